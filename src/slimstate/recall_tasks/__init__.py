"""Six tasks that ask for something the prompt says: task files for lm-eval, which reads this folder as an include path.

They follow the default (not the read-twice) tasks of prefix-linear-attention, the code of "Just read twice" (Arora et
al., 2024): zero-shot, greedy, at most 48 new tokens, up to the end of the line; a document counts when the text holds
an answer. One thing differs. There the document is cut to a window around the answer (DROP and TriviaQA: to its
beginning), and documents whose key or answer has fewer than two characters are left out; here nothing is left out, and
a long prompt loses its beginning, so that the question always stays. With lm-eval alone say `max_length=2096` in
`--model_args` for prompts of 2048 tokens; slimstate does so itself.

The hub's collection names SWDE `hazyresearch/based-swde`, the code there says `based-swde-v2`; that these are the same
documents could not be checked. Columns were read on the dataset cards of FDA, SWDE and NQ (its 512-token sibling), and
from that code for DROP, SQuAD and TriviaQA; the rows themselves were not seen.
"""
