"""Opens a model by name or path: its weights, configuration and tokenizer, checked before any work is done."""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...lang.errors import ModelError, shown
from ..core.cache_folder import cache_folder, keep, read_trusted, trusted
from ..core.vectors import VectorConfig
from ..layers.config_values import MOST_TOKENS, is_token, positive_int
from ..models.vision.config import GRID_DECODERS, decoder_config, sees
from ..models.vision.preprocessor import PREPROCESSOR, read_picture_format
from ..multimodal.format import PictureFormat
from ..tokenizer.file import read_tokenizer_file, token_table
from ..tokenizer.hf import HFTokenizer
from ..tokenizer.merges import FORMAT as MERGES_FORMAT
from ..tokenizer.merges import MergeTables, MergeTokenizer, merge_tables
from ..tokenizer.rerankers import RERANK, answers_of, is_reranker, takes_pairs, with_pairs
from ..tokenizer.tokenizer import VocabularyTokenizer
from ..tokenizer.vocabulary import Vocabulary
from .catalog.names import DEFAULT, DEFAULT_NAMES, locate
from .catalog.places import IN_UMBEL, FoundModel, model_places
from .catalog.repository import HubName
from .default_model import DEFAULT_NAME, open_default
from .documents import Documents, FolderDocuments, GgufDocuments, chat_template_of, named_templates, read_config
from .gguf_architectures import architecture_of
from .gguf_config import config_of
from .gguf_file import GgufFile, open_gguf
from .gguf_parameters import parameters_of
from .gguf_tokenizer import eos_ids, require_known
from .packed_config import read_packed_config
from .safetensors_folder import FLOATS, PACKED, open_tensors
from .vector_config import CLASSIFIER, read_vectors

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
SAMPLES = 64  # pieces of a file that its fingerprint reads
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelSource:
    """One model on disk. Opening it reads configuration and headers; tensors are read when they are used."""

    name: str
    documents: Documents = field(repr=False)
    # Any: config.json as Hugging Face writes it; for a vision model also its preprocessor's file, under `PREPROCESSOR`
    config: Mapping[str, Any] = field(repr=False)
    files: tuple[Path, ...] = field(repr=False)  # of the weights
    open_tensors: "Callable[[], Mapping[str, Tensor]]" = field(repr=False)
    cache: Path = field(repr=False)
    names: Collection[str] = field(repr=False)  # of its tensors; of a GGUF file only that of a classifier is listed

    @cached_property
    def tensors(self) -> "Mapping[str, Tensor]":
        """Hugging Face parameter name → tensor, as `BlockTensors` (layers/checkpoint.py)."""
        return self.open_tensors()

    @property
    def path(self) -> Path:
        """Its folder, or its GGUF file (of several the first, of pieces the whole's name)."""
        return self.documents.path

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text, by generation_config.json or else config.json. Raises ModelError for wrong ones."""
        generation = "generation_config.json"
        places = ((generation, self.documents.read(generation)), (CONFIG, self.config), (CONFIG, self._text_config))
        for name, stated in places:
            value = stated.get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if not all(token is None or is_token(token) for token in ids):
                raise ModelError(
                    f"{self.path}: {name} has eos_token_id={shown(value)}; write the id of the token that ends a text, "
                    "or a list of such"
                )
            if value is not None:
                return frozenset(token for token in ids if token is not None)
        return frozenset()

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding by the config; 0 when it does not state them. Raises ModelError for a wrong number."""
        if self._text_config.get("vocab_size") is None:
            return 0
        with self.named_in_errors():
            return positive_int(self._text_config, "vocab_size", most=MOST_TOKENS)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, by config.json; None where that names none."""
        token = self.config.get("bos_token_id")
        return token if is_token(token) and token < max(self.vocab_size, 1) else None

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Puts the model's path before the messages of ModelErrors that name none."""
        try:
            yield
        except ModelError as error:
            if str(self.path) in str(error):
                raise
            raise ModelError(f"{self.path}: {error}") from error

    @cached_property
    def vectors(self) -> VectorConfig:
        """Describes the vectors that it makes of texts."""
        vectors = read_vectors(self.config, self._text_config, self.documents, self.names)
        if vectors.labels or vectors.answers is not None or vectors.refused or not self._is_reranker:
            return vectors
        try:
            return replace(vectors, answers=answers_of(self.vocabulary()))
        except ModelError as error:
            return replace(vectors, refused=str(error))

    @cached_property
    def _is_reranker(self) -> bool:
        return is_reranker(self.config, self.name, self.documents.title)

    @cached_property
    def fingerprint(self) -> str:
        """Digest that changes with the weights. Samples of the files are hashed with length and time of change, because
        hashing gigabytes at every start takes minutes."""
        digest = sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in self.files:
            digest.update(sample_digest(path))
        return digest.hexdigest()

    def vocabulary(self) -> Vocabulary:
        """Returns the bytes of every token, padded to the rows of the embedding. Kept in the cache folder."""
        key = sha256(f"{self.documents.tokenizer_digest()}/{self.vocab_size}".encode())
        kept = self.cache / "vocabularies" / key.hexdigest()
        with contextlib.suppress(OSError, ModelError):  # missing, damaged or not trusted: it is made, and replaced
            return Vocabulary.of_bytes(read_trusted(kept), kept)
        path = self.documents.tokenizer_path
        file = read_tokenizer_file(self.documents.tokenizer(), path)
        vocabulary = Vocabulary.of(token_table(file, path, size=self.vocab_size))
        keep(kept, vocabulary.to_bytes())
        return vocabulary

    def tokenizer(self, *, find_boundary: bool = True) -> HFTokenizer:
        """Makes the model's tokenizer with its chat template. `find_boundary`: see HFTokenizer."""
        path = self.documents.tokenizer_path
        config = {**self.documents.read("special_tokens_map.json"), **self._tokenizer_config}
        return HFTokenizer(
            read_tokenizer_file(self.documents.tokenizer(), path),
            vocabulary=self.vocabulary(),
            config=config,
            chat_template=self.chat_template,
            eos_ids=self.eos_ids,
            name=self.name,
            path=path,
            find_boundary=find_boundary,
        )

    def constraint_tokenizer(self) -> VocabularyTokenizer:
        """Makes the tokenizer of forced texts: from merge tables that are kept in the cache folder, or else the whole
        one, which takes a second of the interpreter lock and 100 MB for a large vocabulary."""
        tables = self._merge_tables()
        if tables is None:
            return self.tokenizer(find_boundary=False)
        return MergeTokenizer(
            tables,
            self.vocabulary(),
            eos_ids=self.eos_ids,
            path=self.documents.tokenizer_path,
            open_whole=partial(self.tokenizer, find_boundary=False),
        )

    def _merge_tables(self) -> MergeTables | None:
        key = sha256(f"{MERGES_FORMAT}/{self.documents.tokenizer_digest()}".encode())
        kept = self.cache / "merges" / key.hexdigest()
        # Missing, not trusted or damaged: they are made, and replaced.
        with contextlib.suppress(OSError, ModelError, ValueError):
            return MergeTables.of_bytes(read_trusted(kept))
        path = self.documents.tokenizer_path
        tables = merge_tables(read_tokenizer_file(self.documents.tokenizer(), path), path)
        if tables is not None:
            keep(kept, tables.to_bytes())
        return tables

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja source, or None for models without roles. That of a reranker knows the roles of a pair."""
        template = chat_template_of(self._tokenizer_config, self.documents)
        prompt = named_templates(self._tokenizer_config.get("chat_template")).get(RERANK)
        if takes_pairs(template) or (prompt is None and not self._is_reranker):
            return template
        return with_pairs(template) if prompt is None else with_pairs(template, prompt)

    @cached_property
    def picture_format(self) -> PictureFormat | None:
        """Format of its pictures; None: the model reads text only.

        Raises:
            ModelError: the preprocessor's file is missing, does not fit the model, or has a setting that is not
                implemented.
        """
        if not sees(self.config):
            return None
        before, after = picture_surroundings(self.config["model_type"], self._tokenizer_config, self.chat_template)
        return read_picture_format(self.config, before=before, after=after)

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self.documents.read("tokenizer_config.json")

    @cached_property
    def _text_config(self) -> Mapping[str, Any]:
        nested = self.config.get("text_config")  # of those that umbel does not run
        text = decoder_config(self.config)
        return nested if text is self.config and isinstance(nested, dict) else text


def open_model(name_or_path: str | Path = DEFAULT, *, cache: Path | None = None) -> ModelSource:
    """Opens a model: "default", a safetensors folder, a .gguf file, or any other name that `locate` knows.

    Of a GGUF in several files (NAME-00001-of-00003.gguf) it is any of them. A model of the hub that is nowhere on this
    machine is downloaded.

    Raises:
        ModelError: there is no such model, or its files cannot be used; the message says which and what to do.
        MissingExtraError: a package that it needs is not installed.
    """
    cache = cache or cache_folder()
    name = str(name_or_path)
    if name in DEFAULT_NAMES:
        return _source(open_default(cache), DEFAULT_NAME, cache)
    found = locate(name, model_places(cache))
    if isinstance(found, HubName):
        from .catalog.download import download  # with huggingface_hub, which most starts do not need

        found = download(found, model_places(cache))
    return open_found(found, cache)


def open_found(found: FoundModel, cache: Path) -> ModelSource:
    """Opens a model where it lies. Raises as `open_model`."""
    if not found.path.is_dir():
        return _open_file(found.path, found.name, cache)
    if found.place == IN_UMBEL:
        for file in trusted(found.path).iterdir():
            trusted(file)
    return _open_folder(found.path, found.name, cache)


def sample_digest(path: Path) -> bytes:
    """Computes SHA-256 over a file's length, time of change and evenly spaced samples, both ends included."""
    state = path.stat()
    digest = sha256(f"{state.st_size}/{state.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, state.st_size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


# ------------------------------------------------------------------------------------------ how


def _open_file(path: Path, name: str, cache: Path) -> ModelSource:
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one file of a model; give its folder {path.parent}, with config.json and tokenizer"
        )
    return _source(open_gguf(path), name, cache)


def _source(gguf: GgufFile, name: str, cache: Path) -> ModelSource:
    config = config_of(gguf)
    parameters = parameters_of(gguf, architecture_of(gguf), config)
    tokens, rows = len(gguf.metadata.texts("tokenizer.ggml.tokens")), gguf.tensors["token_embd.weight"].shape[0]
    if tokens > rows:  # fewer is usual: matrices are padded
        raise ModelError(f"{gguf.path} is damaged: {tokens} tokens for an embedding of {rows} rows; download it again")
    require_known(gguf)
    ends = eos_ids(gguf)
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]

    def open_tensors() -> "Mapping[str, Tensor]":
        from .gguf_tensors import GgufTensors  # imports torch

        return GgufTensors(parameters)

    names = [each.name for each in parameters if each.name == CLASSIFIER]
    return ModelSource(name, GgufDocuments(gguf, cache), config, gguf.files, open_tensors, cache, names)


def _open_folder(folder: Path, name: str, cache: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"give the file {folder / ggufs[0]}" if ggufs else "give the folder of a downloaded model"
        raise ModelError(f"{folder} holds no config.json; {hint}")
    config = read_config(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type; download it again")
    try:
        kinds = FLOATS if read_packed_config(config) is None else PACKED
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; download it from the model's page into this folder")
    preprocessor = read_preprocessor(folder) if sees(config) else {}
    if preprocessor:
        config[PREPROCESSOR] = preprocessor
    found = open_tensors(folder, kinds)

    def tensors() -> "Mapping[str, Tensor]":
        from .folder_tensors import FolderTensors  # imports torch

        return FolderTensors(found)

    return ModelSource(name, FolderDocuments(folder), config, found.files, tensors, cache, found.places.keys())


_TOKEN_SECTIONS = ("extra_special_tokens", "model_specific_special_tokens")  # of tokenizer_config.json, by version


def read_preprocessor(folder: Path) -> dict[str, Any]:  # Any: JSON
    """Reads the settings of pictures: a part of processor_config.json (transformers 5), or preprocessor_config.json.

    {}: neither file has them.

    Raises:
        ModelError: a file is no JSON object, or the settings are none.
    """
    nested = read_config(folder / "processor_config.json").get("image_processor")
    if nested is None:
        return read_config(folder / "preprocessor_config.json")
    if not isinstance(nested, dict):
        raise ModelError(f"{folder / 'processor_config.json'}: image_processor is no object; download it again")
    return nested


def picture_surroundings(family: str, tokenizer_config: Mapping[str, Any], template: str | None) -> tuple[str, str]:
    """Returns the text before and after a picture's tokens, as in the model's training.

    Gemma 3 has tokens for the begin and end of a picture, between empty lines; Qwen-VL has such tokens alone. Some chat
    templates of LLaVA write white space after each picture; without a template there is none.
    """
    if family == "gemma3":
        begin = _token(tokenizer_config, "boi_token", "<start_of_image>")
        end = _token(tokenizer_config, "eoi_token", "<end_of_image>")
        return f"\n\n{begin}", f"{end}\n\n"
    if family in GRID_DECODERS:
        return "<|vision_start|>", "<|vision_end|>"
    token = re.escape(_token(tokenizer_config, "image_token", "<image>"))
    written = re.search(token + r"((?:\\n|\s)*)['\"]", template or "")  # a string of Jinja, where \n is two characters
    return "", written.group(1).replace("\\n", "\n") if written else ""


def _token(tokenizer_config: Mapping[str, Any], key: str, default: str) -> str:
    for place in (tokenizer_config, *(tokenizer_config.get(name) for name in _TOKEN_SECTIONS)):
        stated = place.get(key) if isinstance(place, Mapping) else None
        text = stated.get("content") if isinstance(stated, Mapping) else stated
        if isinstance(text, str) and text:
            return text
    return default
