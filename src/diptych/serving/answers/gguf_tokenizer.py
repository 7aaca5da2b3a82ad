"""The tokenizer of a GGUF file, built in memory from its vocabulary.

Two kinds: "gpt2", byte-level BPE with merges, of which the file names the rules that split text into words, and
"llama", SentencePiece BPE, whose merges follow from the scores of its tokens. Rules that are not in the table below are
refused by name: with others, the model would see other tokens than it was trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from diptych.control.errors import ConfigError
from diptych.runtime.gguf.gguf_file import GgufFile
from diptych.runtime.gguf.gguf_metadata import GgufMetadata
from diptych.runtime.gguf.gguf_vocabulary import CONTROL, UNKNOWN, USER_DEFINED, GgufVocabulary, read_vocabulary
from diptych.serving.answers.native_panic import is_failure
from diptych.serving.answers.tokenizer_parts import TokenizerParts

MODEL, RULES = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TEMPLATE = "tokenizer.chat_template"
TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}
SPACE = "\u2581"  # what stands for a space in SentencePiece

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class WordRules:
    """How byte-level BPE splits text before it merges. splits: patterns, each applied to the pieces that the one before
    left. ignores_merges: a word that is a token is taken whole. adds_bos: where the file does not say."""

    splits: Sequence[str]
    normalizer: normalizers.Normalizer | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2 = WordRules((GPT2_WORDS,))
_SMOLLM = WordRules((r"\p{N}", GPT2_WORDS))
_LLAMA3 = WordRules((GPT4_WORDS.replace("{DIGITS}", "{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = WordRules((GPT4_WORDS.replace("{DIGITS}", ""),), normalizers.NFC())

WORD_RULES = {
    "default": WordRules(DEFAULT_SPLITS),
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": WordRules(_QWEN2.splits),
    "megrez": _QWEN2,
    "tekken": WordRules((TEKKEN_WORDS,), ignores_merges=True, adds_bos=True),
    "dbrx": WordRules(_LLAMA3.splits),
    "smaug-bpe": WordRules(_LLAMA3.splits),
    "olmo": _GPT2,
    "gpt-4o": WordRules((GPT4O_WORDS,)),
    "seed-coder": WordRules((SEED_WORDS,)),
    "deepseek-coder": WordRules(DEEPSEEK_CODER_SPLITS),
}


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file. Raises ConfigError or UnsupportedModelError that name the key."""
    metadata = GgufFile(path).metadata
    vocabulary = read_vocabulary(metadata)
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": metadata.string(key) or ""
        for key in metadata.values
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    if vocabulary is None:
        return TokenizerParts(None, {}, templates)
    special_tokens = {
        name: vocabulary.texts[vocabulary.roles[role]]
        for role, name in TEMPLATE_NAMES.items()
        if role in vocabulary.roles
    }
    try:
        fast = _build(metadata, vocabulary)
    except ConfigError:
        raise
    except BaseException as error:  # of the tokenizers library, for tokens and merges that do not fit
        if not is_failure(error):
            raise
        raise ConfigError(f"{path}: no tokenizer can be made of tokenizer.ggml ({error})", param="model") from None
    return TokenizerParts(fast, special_tokens, templates)


def _build(metadata: GgufMetadata, vocabulary: GgufVocabulary) -> FastTokenizer:
    ids = {text: token for token, text in enumerate(vocabulary.texts)}
    if len(ids) < len(vocabulary.texts):
        twice = next(text for token, text in enumerate(vocabulary.texts) if ids[text] != token)
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.tokens has {twice!r} twice", param="model")
    kind = metadata.string(MODEL)
    if kind == "gpt2":
        rules = _word_rules(metadata)
        fast, adds_bos = _byte_level(metadata, ids, rules), rules.adds_bos
    elif kind == "llama":
        fast, adds_bos = _sentence_piece(metadata, vocabulary, ids), True
    else:
        raise metadata.unsupported(MODEL, "gpt2, llama")
    fast.add_special_tokens(_added(vocabulary, CONTROL, UNKNOWN))
    fast.add_tokens(_added(vocabulary, USER_DEFINED))
    _frame(fast, metadata, vocabulary, adds_bos)
    return fast


def _word_rules(metadata: GgufMetadata) -> WordRules:
    """The rules that the file names. Old files of Qwen, which name none, mean their own."""
    name = metadata.string(RULES)
    if name is None and str(metadata.string("general.architecture")).startswith("qwen"):
        name = "qwen2"
    if name not in WORD_RULES:
        raise metadata.unsupported(RULES, ", ".join(WORD_RULES))
    return WORD_RULES[name]


def _byte_level(metadata: GgufMetadata, ids: dict[str, int], rules: WordRules) -> FastTokenizer:
    merges = [merge.partition(" ")[::2] for merge in metadata.strings("tokenizer.ggml.merges") or ()]
    if not merges or not all(left and right for left, right in merges):
        raise metadata.unsupported("tokenizer.ggml.merges", "pairs of tokens with a space between them")
    fast = FastTokenizer(models.BPE(ids, merges, ignore_merges=rules.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.splits]
    fast.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    if rules.normalizer is not None:
        fast.normalizer = rules.normalizer
    return fast


def _sentence_piece(metadata: GgufMetadata, vocabulary: GgufVocabulary, ids: dict[str, int]) -> FastTokenizer:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(ids):
        raise metadata.unsupported("tokenizer.ggml.scores", f"{len(ids)} numbers, as tokenizer.ggml.tokens has")
    unknown = vocabulary.roles.get("unk")
    model = models.BPE(
        ids,
        _merges(ids, scores),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = FastTokenizer(model)
    spaces, steps = normalizers.Replace(" ", SPACE), [decoders.Replace(SPACE, " "), decoders.ByteFallback()]
    steps.append(decoders.Fuse())
    fast.normalizer = spaces
    if metadata.flag("tokenizer.ggml.add_space_prefix") is not False:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(steps)
    return fast


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, the best score of the third first, as SentencePiece joins. Of the ways
    to the same token, that with the longest left part is first: runs of one character then split as there."""
    found = []
    for text, token in ids.items():
        pairs = ((text[:cut], text[cut:]) for cut in range(len(text) - 1, 0, -1))
        found += [(-scores[token], pair) for pair in pairs if pair[0] in ids and pair[1] in ids]
    found.sort(key=lambda entry: entry[0])
    return [pair for _, pair in found]


def _added(vocabulary: GgufVocabulary, *types: int) -> list[AddedToken]:
    """Tokens of these types, which are matched in text before it is split."""
    return [
        AddedToken(text, normalized=False, special=USER_DEFINED not in types)
        for token, text in enumerate(vocabulary.texts)
        if vocabulary.types[token] in types and text
    ]


def _frame(fast: FastTokenizer, metadata: GgufMetadata, vocabulary: GgufVocabulary, adds_bos: bool) -> None:
    """Put the tokens around a text that the file asks for."""
    wanted = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token"),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token"),
    }
    if wanted["bos"] is None:
        wanted["bos"] = adds_bos
    tokens = {
        role: (vocabulary.texts[vocabulary.roles[role]], vocabulary.roles[role])
        for role, is_wanted in wanted.items()
        if is_wanted and role in vocabulary.roles
    }
    if tokens:
        before, after = ([tokens[role][0]] if role in tokens else [] for role in ("bos", "eos"))
        fast.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(tokens.values())
        )
