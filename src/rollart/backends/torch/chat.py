"""Chats as tokens: the byte tokenizer of small models, and the tokenizer of a checkpoint folder.

Keeps true: a conversation only ever grows (T1): `prompt` renders the first turn, `reply` what follows a completion, and
no sampled token is decoded and encoded again; where history is to be rewritten, `fork` says so and gives the whole new
context. A sampled stop token belongs to the action; after an action that was cut by length the template's end stands in
the reply (T3).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rollart.backends.torch.settings import ChatSettings
from rollart.core.errors import ConfigError
from rollart.core.ports import Renderer
from rollart.core.tokens import Text, Tokens, ids
from rollart.core.types import ROLES, Completion, Finish, Message
from rollart.envs.tool_calls import translate

_SPECIALS = ("<|pad|>", *(f"<|{role}|>" for role in ROLES), "<|end|>")
_PADDING, _END = 256, 256 + len(_SPECIALS) - 1
_HEADERS = {role: 257 + i for i, role in enumerate(ROLES)}
_BYTE_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


class Chat(Renderer, Protocol):
    """What demonstrations, reports and checkpoints need besides."""

    @property
    def padding(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    def action(self, text: str) -> array[int]:
        """An assistant's reply as the policy would sample it, with its stop token: for demonstrations."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text with special tokens by name: for reports."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer files that transformers' AutoTokenizer reads."""
        ...


class ByteChat:
    """UTF-8 bytes, a header token per role and one end token: a message costs two tokens more than its bytes.

        [user] h i [end] [assistant] | y o [end]        `|`: here the policy begins to speak

    Text is always bytes, so that no content can forge a header. Needs no library.
    """

    stop: tuple[int, ...] = (_END,)
    padding = _PADDING
    vocabulary_size = 256 + len(_SPECIALS)

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        """All messages and the assistant's header. Raises ConfigError for an unknown role."""
        out = ids()
        for message in messages:
            if message.role not in _HEADERS:
                raise ConfigError(f"a message's role must be one of {', '.join(ROLES)}; got {message.role!r}")
            out.append(_HEADERS[message.role])
            out.extend(_real(message.content).encode())
            out.append(_END)
        out.append(_HEADERS["assistant"])
        return out

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Tokens:
        """What follows the sampled tokens, up to the next assistant's header."""
        out = ids() if completion.finish is Finish.STOP else ids([_END])
        out.extend(self.prompt(messages))
        return out

    def fork(self, history: Sequence[Message], context: Tokens) -> None:
        """Past turns stay as they were."""

    def text(self, completion: Completion) -> Text:
        """The action as text, without its stop token; broken UTF-8 becomes replacement characters."""
        return self.decode(_spoken(completion))

    def action(self, text: str) -> array[int]:
        return ids([*text.encode(), _END])

    def decode(self, tokens: Iterable[int]) -> str:
        out, run = [], bytearray()
        for token in tokens:
            if token < 256:
                run.append(token)
            else:
                name = _SPECIALS[token - 256] if token < self.vocabulary_size else f"<|{token}|>"
                out += [run.decode(errors="replace"), name]
                run.clear()
        return "".join(out) + run.decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Tokenizer files that give transformers' AutoTokenizer the same ids and the same chat template."""
        special = [{"id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                    "normalized": False, "special": True} for i, name in enumerate(_SPECIALS)]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        tokenizer = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "vocab": {character: byte for byte, character in enumerate(_byte_characters())}, "merges": []}}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "byte_chat": True, "pad_token": "<|pad|>",
                  "eos_token": "<|end|>", "clean_up_tokenization_spaces": False, "chat_template": _BYTE_TEMPLATE}
        for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), [256]."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


_SPEECH = "zqSPEECHqz"
_AGAIN = (Message("user", "one"), Message("assistant", _SPEECH), Message("user", "two"))


class HFChat:
    """The tokenizer and chat template of a Hugging Face folder, applied in pieces.

    A reply is the template's rendering of (user, placeholder, new messages) from the placeholder on, so earlier turns
    keep their exact ids, reasoning included, whatever the template would make of them in its history. With
    `reasoning = "drop"` past turns are rendered anew without their reasoning, and the trajectory forks. Tool calls are
    translated between the model's format and that of tasks.
    """

    def __init__(self, folder: Path | str, settings: ChatSettings | None = None) -> None:
        self._folder, self._settings = Path(folder), settings or ChatSettings()
        self._tokenizer = _tokenizer(self._folder)
        glue = self._encode(self._after_speech(_AGAIN))
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        end = next((token for token in glue if token in special), None)
        if end is None:
            raise ConfigError(f"the chat template of {self._folder} ends no assistant turn with a special token")
        self.stop: tuple[int, ...] = tuple(dict.fromkeys([end, *self._ends()]))
        padding = self._tokenizer.pad_token_id
        self.padding: int = end if padding is None else padding
        self.vocabulary_size = len(self._tokenizer)

    def _after_speech(self, messages: Sequence[Message]) -> str:
        """What the template writes behind the placeholder, the only assistant's turn of `messages`."""
        before, found, after = self._render(messages).rpartition(_SPEECH)
        if not found or _SPEECH in before:
            raise ConfigError(f"the chat template of {self._folder} does not write a past assistant's words once")
        return after

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        """The template's prompt with its generation header. Raises ConfigError when the template refuses it."""
        return ids(self._encode(self._render(messages)))

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Tokens:
        """The template's glue, without its end where that was sampled; the new messages; the next header."""
        glue = self._encode(self._after_speech([*_AGAIN[:2], *messages]))
        if completion.finish is Finish.STOP:
            glue = glue[glue.index(self.stop[0]) + 1:]
        return ids(glue)

    def fork(self, history: Sequence[Message], context: Tokens) -> Tokens | None:
        """The history rendered anew where that reads otherwise than `context`; never with reasoning = "keep"."""
        if self._settings.reasoning == "keep":
            return None
        whole = self._render([replace(message, content=self._native(_answer(_real(message.content))))
                              if message.role == "assistant" else message for message in history])
        assert isinstance(context, array)
        return None if whole == self.decode(context) else ids(self._encode(whole))

    def text(self, completion: Completion) -> Text:
        """The action as text, without its stop token; tool calls as tags."""
        return translate(self.decode(_spoken(completion)), self._settings.tools, "tags")

    def action(self, text: str) -> array[int]:
        return ids([*self._encode(self._native(text)), self.stop[0]])

    def _native(self, text: str) -> str:
        """With tool calls as the model writes them."""
        return translate(text, "tags", self._settings.tools)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError
        conversation = [{"role": message.role, "content": _real(message.content)} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"the chat template of {self._folder} refuses the roles {roles}: {error}") from None

    def _ends(self) -> list[int]:
        """End-of-sequence ids of the tokenizer and of generation_config.json."""
        path = self._folder / "generation_config.json"
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        listed = configured if isinstance(configured, list) else [configured]
        return [end for end in (self._tokenizer.eos_token_id, *listed) if end is not None]


def _answer(text: str) -> str:
    """What follows the reasoning; all of a text without any. A header may have opened the reasoning."""
    _, found, after = text.rpartition("</think>")
    return after.lstrip("\n") if found else text


def load_chat(folder: Path | str, settings: ChatSettings | None = None) -> ByteChat | HFChat:
    """The chat of a checkpoint folder: ByteChat where `ByteChat.save` wrote it, else HFChat. Raises ConfigError."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"a chat needs a checkpoint folder with a tokenizer; {folder} has no tokenizer_config.json"
                          ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / 'tokenizer_config.json'} is not JSON: {error}") from None
    return ByteChat() if config.get("byte_chat") else HFChat(folder, settings)


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"the tokenizer of {folder} needs transformers: pip install 'rollart[hf]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{folder} holds no tokenizer that transformers loads: {reason}") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {folder} has no chat template; add one as chat_template.jinja")
    return tokenizer


def _spoken(completion: Completion) -> Sequence[int]:
    tokens = completion.tokens
    if not isinstance(tokens, array):
        raise TypeError("real chats need real tokens; got Counted")
    return tokens[:-1] if completion.finish is Finish.STOP else tokens


def _real(text: Text) -> str:
    if not isinstance(text, str):
        raise TypeError("real chats need real text; got Counted")
    return text
