"""Text to token ids and back, and chat messages to a prompt, as the files of a model say. Imports neither torch nor
transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from diptych.control.errors import ContextLengthError, InvalidRequestError
from diptych.runtime.gguf.gguf_file import is_gguf
from diptych.serving.answers.chat_renderer import ChatRenderer
from diptych.serving.answers.detokenizer import Detokenizer, whole_texts
from diptych.serving.answers.gguf_tokenizer import read_gguf_tokenizer
from diptych.serving.answers.native_panic import is_failure
from diptych.serving.answers.response.answer_format import answer_format
from diptych.serving.answers.template_messages import flatten_content as flatten_content
from diptych.serving.answers.template_profile import TemplateProfile
from diptych.serving.answers.token_length import TokenLength
from diptych.serving.answers.tokenizer_parts import read_directory


class Tokenizer:
    """The tokenizer of a model directory or a GGUF file. A directory without tokenizer.json gives one that serves token
    ids only. tool_format: see answer_format.py."""

    def __init__(self, model: Path, tool_format: str = "auto") -> None:
        parts = read_gguf_tokenizer(model) if is_gguf(model) else read_directory(model)
        self.special_tokens = parts.special_tokens
        self._fast = parts.fast
        self._whole_texts = whole_texts(self._fast) if self._fast else None
        self._templates = parts.templates
        self._chat = ChatRenderer(parts.templates, parts.special_tokens)
        self.answer_format = answer_format(
            parts.templates, parts.response_template, tool_format, takes_tools=self.takes_tools
        )
        self.response_template = self.answer_format.template
        self._token_bytes: dict[int, bytes] = {}

    @property
    def has_text(self) -> bool:
        """Whether text can be encoded and decoded at all."""
        return self._fast is not None

    @property
    def fast(self) -> FastTokenizer:
        """The tokenizers object. Raises InvalidRequestError when the model has none."""
        if self._fast is None:
            raise InvalidRequestError(
                "this model has no tokenizer (no tokenizer.json): send prompts as lists of token ids", param="prompt"
            )
        return self._fast

    @property
    def vocab_size(self) -> int:
        """Token ids the tokenizer knows (0 without one)."""
        return self._fast.get_vocab_size(with_added_tokens=True) if self._fast else 0

    @cached_property
    def token_length(self) -> TokenLength:
        """What is known of the number of tokens of a text before it is encoded."""
        return TokenLength(self.fast)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", limit: int | None = None
    ) -> list[int]:
        """Token ids of a text. limit: the length of the context. Raises as ``encoding`` does."""
        return self.encoding(text, add_special_tokens=add_special_tokens, param=param, limit=limit).ids

    def encoding(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", limit: int | None = None
    ) -> Encoding:
        """The tokens of a text, of which none is an object of Python yet: their number costs nothing more. limit: the
        length of the context. Raises ContextLengthError for a text that is too long, before it is encoded where its
        length in bytes says so; InvalidRequestError for a text that the tokenizer cannot take: one with a lone
        surrogate, or one on which its regular expression exceeds its limit of retries."""
        if limit is not None and len(text) >= limit and (least := self.token_length.least_tokens(text)) >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; the prompt is too long: its {len(text)} "
                f"characters have at least {least}, and at least 1 is for the answer",
                param=param,
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{param} is no valid Unicode text (lone surrogate)", param=param) from None
        fast = self.fast
        try:  # as a batch: ``encode`` would hold the GIL all the time, for seconds when the text has megabytes
            [encoding] = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _refusal(error, f"{param}: the tokenizer cannot encode this text", param) from None
        if limit is not None and len(encoding) >= limit:  # before each becomes an object of Python
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; the prompt is too long: it has "
                f"{len(encoding)}, and at least 1 is for the answer",
                param=param,
            )
        return encoding

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, param: str = "prompt") -> str:
        """Text of token ids; ids that the tokenizer does not know give no text. Raises InvalidRequestError when it
        cannot decode them."""
        fast = self.fast
        try:  # as a batch, for the GIL
            [text] = fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _refusal(error, f"{param}: the tokenizer cannot decode these tokens", param) from None
        return text

    def detokenizer(self, prompt_token_ids: Sequence[int], shown: Mapping[int, str] = {}) -> Detokenizer | None:
        """A fresh detokenizer for a sequence after this prompt; None without a tokenizer. shown: special tokens that
        are part of the text."""
        return Detokenizer(self._fast, prompt_token_ids, self._whole_texts, shown) if self._fast else None

    @property
    def has_chat_template(self) -> bool:
        """Whether a conversation can become a prompt."""
        return self._chat.is_usable and self._fast is not None

    @property
    def template_profile(self) -> TemplateProfile | None:
        """What the chat template takes, with the format in which answers are read; None where there is none."""
        profile = self._chat.profile
        template = self.response_template
        return profile and replace(profile, answers=template.name if template is not None else None)

    @property
    def template_complaints(self) -> list[str]:
        """What is wrong with the chat templates, a sentence each."""
        return self._chat.complaints

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template renders tools."""
        profile = self._chat.tools_profile
        return profile is not None and profile.tools

    @property
    def takes_system(self) -> bool:
        """Whether the chat template renders a system message at the beginning."""
        return self._chat.profile is not None and self._chat.profile.system == "taken"

    @property
    def special_token_ids(self) -> dict[str, int]:
        """The special tokens, text to id."""
        added = self._fast.get_added_tokens_decoder() if self._fast else {}
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def template_mentions(self, text: str) -> bool:
        """Whether a chat template has this text."""
        return any(text in source for source in self._templates.values())

    def special_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        """The special tokens, id to text, that occur in any of these texts."""
        known = self.special_token_ids.items()
        return {token_id: token for token, token_id in known if any(token in text for text in texts)}

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens included, incomplete characters as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False) if self._fast else f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also when they are only a part of a character."""
        known = self._token_bytes.get(token_id)
        if known is None:
            text = self.token_text(token_id)
            known = text.encode()
            if "\ufffd" in text and self._fast and (name := self._fast.id_to_token(token_id)):
                known = _bytes_of_name(name) or known
            self._token_bytes[token_id] = known
        return known

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. continue_final_message: the prompt ends with the text of the last message.

        Raises InvalidRequestError when there is no template or it refuses, ChatTemplateError when it is broken."""
        arguments = {**(template_arguments or {}), "add_generation_prompt": add_generation_prompt}
        return self._chat.render(messages, arguments, continues=continue_final_message)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; the template writes the special tokens itself. limit: see encode."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_arguments=template_arguments,
        )
        return self.encode_rendered(text, limit)

    def encode_rendered(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of what ``render_chat`` gives."""
        return self.encode(text, add_special_tokens=False, param="messages", limit=limit)

    def count_rendered(self, text: str) -> int:
        """How many they are."""
        return len(self.encoding(text, add_special_tokens=False, param="messages"))


def _refusal(error: BaseException, message: str, param: str) -> BaseException:
    """What to raise for a failed call of the tokenizers library, which raises bare Exceptions and panics."""
    return InvalidRequestError(f"{message} ({error})", param=param) if is_failure(error) else error


def _bytes_of_name(name: str) -> bytes | None:
    """The bytes behind a token's name: byte-fallback (<0x0A>) or the byte-level alphabet of GPT-2."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in name)
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself when printable, else the next free code point from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + number): byte for number, byte in enumerate(hidden)})
    return table


_BYTE_OF_CHARACTER = _byte_alphabet()
