"""Six tasks whose answers are in the prompt: task files for lm-eval, which reads this folder as an include path.

They follow the default (not the read-twice) tasks of prefix-linear-attention, the code of "Just read twice" (Arora et
al., 2024), with its option `cutting_context`: docs/EXPERIMENTS.md. docs/guides/evaluate.md has the command of lm-eval.
If its `model_args` names neither `pretrained` nor `tokenizer` (for a model built in Python, say), give it the
`metadata` {"tokenizer": NAME}; without it only the beginning of a long prompt is truncated.
"""
