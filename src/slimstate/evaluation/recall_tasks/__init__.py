"""Six tasks that ask for something the prompt says: task files for lm-eval, which reads this folder as an include path.

They follow the default (not the read-twice) tasks of prefix-linear-attention, the code of "Just read twice" (Arora et
al., 2024), with its option `cutting_context`: zero-shot, greedy, at most 48 new tokens, up to the end of the line; a
document counts when the text holds an answer. A prompt has at most 2048 tokens of the model's tokenizer. In a longer
one the question stays whole, and of the document a window around the first place of the first answer (FDA, SWDE: of the
key or the value, whichever comes first), its end where there is no such place; DROP and TriviaQA keep its beginning.
Documents whose first answer (FDA, SWDE: key or value) has fewer than two characters are left out, except in DROP and
TriviaQA.

Three things differ. There the document has 1998 tokens and the question comes on top; here both together have 2048.
There at most half of the tokens stand before the answer, even where the document would fit or ends soon after it, so
that such prompts are shorter; here a document that fits is left alone, and a window is always full. There the columns
`alt_answers` and `tok_pos`, where a dataset has them, help to find a place; here they are not read.

slimstate hands the tokenizer of the loaded model to the tasks. lm-eval's own command, which has this folder as its
`include_path`, takes it from `model_args`, such as `pretrained=FOLDER,max_length=2096`: without that length it cuts the
beginning off prompts that are too long for the context of the model's config less 48 tokens. README.md has the whole
command. Where `model_args` names neither `pretrained` nor `tokenizer` (a model made in Python, say), give it the
`metadata` {"tokenizer": NAME}; without it nothing but the beginning of a long prompt is cut.

The hub's collection names SWDE `hazyresearch/based-swde`, the code there says `based-swde-v2`; that these are the same
documents could not be checked. Columns were read on the dataset cards of FDA, SWDE and NQ (its 512-token sibling), and
from that code for DROP, SQuAD and TriviaQA; the rows themselves were not seen.
"""
