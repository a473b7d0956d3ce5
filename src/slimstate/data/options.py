"""Options of every command that reads text."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from slimstate.data.rows import Texts, as_text_source
from slimstate.system.options import Options

if TYPE_CHECKING:
    from slimstate.data.documents import Reading

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
TextSource = Annotated[Any, as_text_source]  # a path, a dataset's name, or strings, chats or rows in any iterable


class DocumentOptions(Options):
    """Text"""

    documents: Literal["lines", "blank", "file", "rows"] | None = None
    """What is a document: lines, blank (text between blank lines), file or rows; default: a .txt file or a row of a
    table; rows that are lines of one text are joined."""
    special_tokens: Literal["end", "tokenizer"] = "end"
    """Special tokens around a document: end (an end-of-text token after it), or tokenizer (what the tokenizer adds by
    itself, as in the paper's released code)."""

    def reading(self, source: str | Texts) -> "Reading":
        """Return a text that is divided and marked as these options say."""
        from slimstate.data.documents import Reading

        return Reading(source, self.documents, self.special_tokens)


class TextOptions(DocumentOptions):
    """Text"""

    seed: Seed = 0
    """Seed of everything that is drawn at random."""


class EvalText(Options):
    """Measurement"""

    eval_text: TextSource = None
    """Text to measure the uncut model and the result on, by perplexity and associative recall; default: none."""
    eval_tokens: Annotated[int | None, Meta(ge=2)] = None
    """Measure on this many tokens, the first of `eval_text`; default: all of it."""
