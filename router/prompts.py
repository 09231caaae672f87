"""What clients write to the token ids that engines read, within the bounds of one model.

Owns: the template and the tokenizer of one model, and the bounds on prompts. Imports both and the models of messages.
Safe to use from several threads. Invariants: the time that tokenising takes is bounded by the context's length, however
long the text is; no id leaves that the model has no embedding of.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.model import ModelFolder
from router.bodies import Message
from router.errors import ApiError
from router.template import ChatTemplate, ChatTemplateError
from router.tokenizer import PromptTokenizer

TEXT_BYTES_PER_TOKEN = 16
"""Longest text that is tokenised, in UTF-8 bytes for each token that there may be. Prose has 3 to 5 and code up to 10; a
megabyte takes about a second, and several where each of its characters is a token."""
_PIECE_CHARS_PER_TOKEN = 4
_CUT_TOKENS = 64
"""More than a cut within a text can add to its tokens."""


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, model: ModelFolder, max_model_len: int) -> None:
        """Read the model's tokenizer and compile its chat template.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        self.max_model_len = max_model_len
        self._vocab_size = model.vocab_size
        self._tokenizer = PromptTokenizer(model.tokenizer_path)
        self.codec = self._tokenizer.codec
        self.token_strs = self._tokenizer.token_strs
        self.decode = self._tokenizer.decode
        self._template = ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a chat.

        Raises:
            ApiError: the model has no template, or it does not take these messages.
        """
        if self._template is None:
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        plain: list[dict[str, str]] = []
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            name = {} if message.name is None else {"name": message.name}
            plain.append({"role": role, "content": message.content, **name})
        try:
            return self._template.render(plain, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error

    def encode(
        self, text: str, param: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The token ids of `text`, which parameter `param` gave. They may be a few more than `max_tokens` (none: than the
        context holds); text that would have far more is refused without being tokenised whole.

        Raises:
            ApiError: 400 naming the parameter.
        """
        tokens = max_tokens or self.max_model_len
        size = len(text) if text.isascii() else len(text.encode())
        if size > TEXT_BYTES_PER_TOKEN * tokens:
            message = (
                f"{param} has {size} bytes of text; at most {TEXT_BYTES_PER_TOKEN * tokens} are read here, "
                f"{TEXT_BYTES_PER_TOKEN} for each of {tokens} tokens."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        self._check_pieces(text, param, tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_pieces(self, text: str, param: str, tokens: int) -> None:
        """Stop a long text at the piece with which it is too long: what follows changes only the tokens at the cuts."""
        piece_chars, counted = _PIECE_CHARS_PER_TOKEN * tokens, 0
        if len(text) <= piece_chars:
            return
        for begin in range(0, len(text), piece_chars):
            piece = text[begin : begin + piece_chars]
            counted += len(self._tokenizer.encode(piece, add_special_tokens=False)) - _CUT_TOKENS
            if counted > tokens:
                message = (
                    f"{param} is longer than {tokens} tokens: its first {begin + len(piece)} of {len(text)} characters "
                    f"make at least {counted}."
                )
                raise ApiError(400, message, param=param, code="context_length_exceeded")

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError where the model has no embedding of one. A text may have such too: a tokenizer's added
        tokens."""
        if not (min(ids) >= 0 and max(ids) < self._vocab_size):
            raise ApiError(400, f"Token ids must lie in 0..{self._vocab_size - 1}.", param=param)
