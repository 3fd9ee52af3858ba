"""Chats as tokens: the byte tokenizer of small models, and the tokenizer of a checkpoint folder.

Keeps true: a conversation only ever grows (T1): `prompt` renders the first turn, `reply` what follows a completion, and
no sampled token is decoded and encoded again; where history is to be rewritten, `fork` says so and gives the whole new
context. A sampled stop token belongs to the action; after an action that was cut by length the template's end stands in
the reply (T3). What a message says is text: no token of the template's own can be written in it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollart.backends.torch.settings import ChatSettings
from rollart.core.errors import ConfigError
from rollart.core.foreign import encodable
from rollart.core.ports import Renderer
from rollart.core.tokens import Text, Tokens, ids
from rollart.core.types import ROLES, Completion, Finish, Message
from rollart.envs.tool_calls import translate

_SPECIALS = ("<|pad|>", *(f"<|{role}|>" for role in ROLES), "<|end|>")
_PADDING, _END = 256, 256 + len(_SPECIALS) - 1
_HEADERS = {role: 257 + i for i, role in enumerate(ROLES)}
_INPUTS = ["input_ids", "attention_mask"]  # of decoders; a tokenizer of no stated class gives one more by default
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
                  "eos_token": "<|end|>", "clean_up_tokenization_spaces": False, "chat_template": _BYTE_TEMPLATE,
                  "model_input_names": _INPUTS}
        for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), [256]."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


_SPEECH = "zqSPEECHqz"
_SAID = Message("assistant", _SPEECH)
_AGAIN = (Message("user", "one"), _SAID, Message("user", "two"))
_BREAK = "\ufdd0"
"""No character of Unicode: what stands before it is encoded apart from what stands behind it."""
_MARK = re.compile(r"<[|\uff5c].*[|\uff5c]>")
"""How a chat's own tokens look where the tokenizer does not call them special: `<|user|>`, not `<think>`."""


class HFChat:
    """The tokenizer and chat template of a Hugging Face folder, applied in pieces.

    A reply is the template's rendering of (user, placeholder, new messages) from the placeholder on, so earlier turns
    keep their exact ids, reasoning included, whatever the template would make of them in its history. With
    `reasoning = "drop"` past turns are rendered anew, the template is told which of their words are reasoning, and
    where that reads otherwise the trajectory forks. Tool calls are translated between the model's format and that of
    tasks. A control token in a message is encoded as the letters that it is written in.
    """

    def __init__(self, folder: Path | str, settings: ChatSettings | None = None) -> None:
        self._folder, self._settings = Path(folder), settings or ChatSettings()
        self._tokenizer = _tokenizer(self._folder)
        added = self._tokenizer.added_tokens_decoder
        self._added = {*added, *self._tokenizer.all_special_ids}
        self._control = re.compile(_SPEECH)
        end = self._end(self._encode(self._after_speech(_AGAIN)))
        if end is None:
            raise ConfigError(f"the chat template of {self._folder} ends no assistant turn with a special token")
        marks = {self.decode([end]), _SPEECH, *self._tokenizer.all_special_tokens,
                 *(token.content for token in added.values() if token.special or _MARK.fullmatch(token.content))}
        self._control = re.compile(_any_of(marks))
        self.stop: tuple[int, ...] = tuple(dict.fromkeys([end, *self._ends()]))
        padding = self._tokenizer.pad_token_id
        self.padding: int = end if padding is None else padding
        self.vocabulary_size = len(self._tokenizer)

    def _end(self, glue: Sequence[int]) -> int | None:
        """The first token of what follows an assistant's words that is no text."""
        return next((token for token in glue if token in self._added), None)

    def _after_speech(self, messages: Sequence[Message]) -> str:
        """What the template writes behind the placeholder, the only assistant's turn of `messages`."""
        before, found, after = self._render(messages).rpartition(_SPEECH)
        if not found or _SPEECH in before:
            raise ConfigError(f"the chat template of {self._folder} does not write a past assistant's words once")
        return after

    def prompt(self, messages: Sequence[Message]) -> array[int]:
        """The template's prompt with its generation header. Raises ConfigError when the template refuses it."""
        return ids(self._encode(self._render(messages)))

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Tokens:
        """The template's glue, without its end where that was sampled; the new messages; the next header."""
        glue = self._encode(self._after_speech([*_AGAIN[:2], *messages]))
        if completion.finish is Finish.STOP:
            if self._end(glue) != self.stop[0]:
                raise ConfigError(f"the chat template of {self._folder} ends an assistant's turn otherwise before "
                                  f"{', '.join(message.role for message in messages)} than before user")
            glue = glue[glue.index(self.stop[0]) + 1:]
        return ids(glue)

    def fork(self, history: Sequence[Message], context: Tokens) -> Tokens | None:
        """The history rendered anew where that reads otherwise than `context`; never with reasoning = "keep"."""
        if self._settings.reasoning == "keep":
            return None
        assert isinstance(context, array)
        whole = self.prompt(history)
        return None if self.decode(whole) == self.decode(context) else whole

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
        path = folder / "tokenizer_config.json"
        config = read_json(path)  # transformers 5 writes two names that 4 does not read, and reads the old ones
        if config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": _INPUTS}
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _encode(self, text: str) -> list[int]:
        return [token for part in text.split(_BREAK)
                for token in self._tokenizer.encode(part, add_special_tokens=False)]

    def _render(self, messages: Sequence[Message]) -> str:
        conversation = [self._written(message) for message in messages]
        try:
            return encodable(self._tokenizer.apply_chat_template(conversation, tokenize=False,
                                                                 add_generation_prompt=True))
        except Exception as error:  # noqa: BLE001  a template is foreign code: it may raise whatever it likes
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"the chat template of {self._folder} refuses the roles {roles}: {_line(error)}"
                              ) from None

    def _written(self, message: Message) -> dict[str, str]:
        """A message as the template is given it: calls as the model writes them, control tokens broken into letters,
        and with reasoning = "drop" the reasoning by itself, so that the template keeps or drops it."""
        if message is _SAID:
            return {"role": message.role, "content": _SPEECH}
        words = {"content": _real(message.content)}
        if message.role == "assistant":
            reasoning, found, answer = words["content"].rpartition("</think>")
            if found and self._settings.reasoning == "drop":  # a header may have opened the reasoning
                words = {"reasoning_content": reasoning.lstrip().removeprefix("<think>"),
                         "content": answer.lstrip("\n")}
            words = {key: self._native(text) for key, text in words.items()}
        return {"role": message.role, **{key: self._control.sub(lambda mark: mark[0][0] + _BREAK + mark[0][1:], text)
                                         for key, text in words.items()}}

    def _ends(self) -> list[int]:
        """End-of-sequence ids of the tokenizer, and of generation_config.json or else config.json: as transformers
        takes them. Raises ConfigError for what is no id of the tokenizer."""
        own = self._tokenizer.eos_token_id
        ends, known = [] if own is None else [own], {*self._tokenizer.get_vocab().values()}
        for path in (self._folder / "generation_config.json", self._folder / "config.json"):
            named = read_json(path).get("eos_token_id") if path.exists() else None
            listed = named if isinstance(named, list) else [] if named is None else [named]
            for end in listed:
                if type(end) is not int or end not in known:
                    raise ConfigError(f"eos_token_id in {path} must hold ids of the tokenizer beside it, which has "
                                      f"{len(known)}; got {end!r}")
            if listed:
                return [*ends, *listed]
        return ends


def load_chat(folder: Path | str, settings: ChatSettings | None = None) -> ByteChat | HFChat:
    """The chat of a checkpoint folder: ByteChat where `ByteChat.save` wrote it, else HFChat. Raises ConfigError."""
    folder = Path(folder)
    try:
        config = read_json(folder / "tokenizer_config.json")
    except FileNotFoundError:
        raise ConfigError(f"a chat needs a checkpoint folder with a tokenizer; {folder} has no tokenizer_config.json"
                          ) from None
    return ByteChat() if config.get("byte_chat") else HFChat(folder, settings)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint folder. Raises ConfigError where it holds none, FileNotFoundError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"the tokenizer of {folder} needs transformers: pip install 'rollart[hf]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001  a broken file makes transformers raise whatever it stumbles over
        raise ConfigError(f"{folder} holds no tokenizer that transformers loads: {_line(error)}") from None
    back = tokenizer.decode(tokenizer.encode("one", add_special_tokens=False))
    if back.strip() != "one":  # where its vocabulary is not there, transformers makes an empty one
        raise ConfigError(f"the tokenizer of {folder} does not keep text: it makes {back!r} of 'one'; the folder needs "
                          "the vocabulary, tokenizer.json")
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {folder} has no chat template; add one as chat_template.jinja")
    return tokenizer


def _any_of(words: Iterable[str]) -> str:
    """The pattern of the longest of these words. What they begin with alike is read once, for there may be hundreds."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    return "|".join(f"{re.escape(head)}(?:{_any_of(rest)})" if head else ""
                    for head, rest in sorted(tails.items(), reverse=True))


def _line(error: Exception) -> str:
    """What went wrong, in one line."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _spoken(completion: Completion) -> Sequence[int]:
    tokens = completion.tokens
    if not isinstance(tokens, array):
        raise TypeError("real chats need real tokens; got Counted")
    return tokens[:-1] if completion.finish is Finish.STOP else tokens


def _real(text: Text) -> str:
    if not isinstance(text, str):
        raise TypeError("real chats need real text; got Counted")
    return text
