"""GGUF files read back equal the transformers models they were written from."""

import itertools
import json
import mmap
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from umbel.lang.errors import ModelError, UmbelError
from umbel.srt.layers.checkpoint import BlockTensors
from umbel.srt.weights import ModelSource, open_model
from umbel.srt.weights.gguf_file import TENSOR_TYPES, open_gguf, open_pieces
from umbel.srt.weights.gguf_rope import llama3_factors
from umbel.srt.weights.gguf_tokenizer import recover_merges, tokenizer_json

from .tiny import BY_NAME, FAMILIES, GEMMA4, LLAMA3_ROPE, Family, write_gguf


@dataclass(frozen=True)
class Opened:
    """A family's model as transformers holds it, and as it came out of a GGUF file."""

    family: Family
    model: PreTrainedModel
    source: ModelSource


@pytest.fixture(scope="module", params=BY_NAME)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    family = BY_NAME[request.param]
    folder = tmp_path_factory.mktemp("opened")
    model = write_gguf(folder / "tiny.gguf", family)
    return Opened(family, model, open_model(folder / "tiny.gguf", cache=folder / "cache"))


@pytest.mark.sampled(4)
def test_every_parameter_comes_back_in_hugging_faces_order(opened: Opened) -> None:
    model, source = opened.model, opened.source
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(source.tensors) == set(expected)
    for parameter, value in expected.items():
        actual = source.tensors[parameter]
        if opened.family.adds_one_to_norms and parameter.endswith("norm.weight"):  # 1 + w was rounded
            assert torch.equal(actual, (value + 1) - 1), parameter
        else:
            assert torch.equal(actual, value), parameter


def test_the_config_and_the_tensors_give_the_same_logits_in_transformers(opened: Opened) -> None:
    model, source = opened.model, opened.source
    config = AutoConfig.for_model(**{"pad_token_id": 0, **source.config})  # some defaults are past a tiny vocabulary
    again = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    again.load_state_dict(dict(source.tensors), strict=not config.tie_word_embeddings)
    ids = torch.arange(3, 40)[None] % model.config.vocab_size
    with torch.no_grad():
        difference = (model(ids).logits - again(ids).logits).abs().max()
    assert difference < 1e-4  # the same weights; RoPE tables may differ in the last bit


def test_the_tokenizer_encodes_as_the_one_it_was_written_from(opened: Opened) -> None:
    tokenizer = opened.source.tokenizer()
    original = opened.family.tokenizer()
    for text in ("The capital of France is Paris.", "東京 naïve\n\n  spaces", "🙂 x", "<think>a"):
        assert tokenizer.encode(text, first=True) == original.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_ids == {original.token_to_id("</s>"), original.token_to_id("<|im_end|>")}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.template_tokens["bos_token"] == "<s>"


def test_a_tokenizer_of_gemma_4_has_the_merges_of_its_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", GEMMA4)
    tokenizer = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache").tokenizer()
    original = GEMMA4.tokenizer()
    for text in ("The capital of France is Paris.", "naïve\n\n  spaces"):
        assert tokenizer.encode(text, first=True) == original.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_tensors_come_back_as_the_gguf_library_dequantises_them(kind: str, tmp_path: Path) -> None:
    family = BY_NAME["llama"]
    model = write_gguf(tmp_path / "tiny.gguf", family, kind=kind)
    source = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    name = "model.layers.1.mlp.up_proj.weight"  # its rows keep their order
    raw_type = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(model.state_dict()[name].numpy(), raw_type)
    assert torch.equal(source.tensors[name].float(), torch.from_numpy(gguf.quants.dequantize(raw, raw_type)))
    assert isinstance(source.tensors, BlockTensors)
    block = source.tensors.block(name)
    assert block is not None
    assert (block.kind, block.shape, block.heads) == (kind, (96, 64), None)
    assert block.data.tobytes() == raw.tobytes()
    assert source.tensors.block("model.norm.weight") is None
    turned = source.tensors.block("model.layers.0.self_attn.k_proj.weight")
    assert turned is not None
    assert turned.heads == 2


def test_every_type_that_is_listed_as_readable_can_be_dequantised() -> None:
    for number, (name, block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, block_bytes))
        if name not in ("F32", "F16"):
            zeros = np.zeros((1, block_bytes), np.uint8)
            assert gguf.quants.dequantize(zeros, kind).shape == (1, block)


def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = BY_NAME["llama, llama3 rope"].build(32).config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = LLAMA3_ROPE["rope_theta"] ** (-torch.arange(0, 32, 2).double() / 32)
    assert np.allclose(llama3_factors(500_000.0, 32, 8.0, 8192), (plain / frequencies).numpy(), rtol=1e-5)


def test_the_config_says_what_transformers_configured(opened: Opened) -> None:
    model = opened.model
    config = AutoConfig.for_model(**opened.source.config)
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, key) == getattr(model.config, key), key
    assert getattr(config, "layer_types", None) == getattr(model.config, "layer_types", None)


TEXTS = (
    "I'll pay 12345 €, they're THERE.\r\n\n  Don't\tgo!!  ",
    "cafe\u0301 naïve 東京都 e\u0301 🙂👩‍👩‍👧 Привет",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}\n\n\n",
    "<think>HelloWorld camelCase</think> Ünïcode IIIrd",
)


@pytest.mark.parametrize("pre_tokenizer", ["qwen2", "smaug-bpe", "gpt-2"])
def test_byte_level_text_is_cut_as_transformers_cuts_it_for_the_same_file(pre_tokenizer: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer=pre_tokenizer))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache").tokenizer()
    for text in map(composed, TEXTS) if pre_tokenizer == "qwen2" else TEXTS:
        assert ours.encode(text, first=True) == theirs.encode(text, add_special_tokens=False)


def test_digits_of_a_granite_tokenizer_are_cut_out_before_all_else(tmp_path: Path) -> None:
    """llama.cpp applies two expressions after each other; the file's tokenizer has one for both."""
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = pre_tokenizers.Sequence([digits, rest])
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer="refact"))
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(open_gguf(tmp_path / "tiny.gguf")))).pre_tokenizer
    for text in (*TEXTS, "a  5  6 b\n\n 7\t", "x = 10   # 3  times"):
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def test_words_of_gpt_4o_keep_their_contractions(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer="gpt-4o"))
    cut = Tokenizer.from_str(json.dumps(tokenizer_json(open_gguf(tmp_path / "tiny.gguf")))).pre_tokenizer
    pieces = [piece for piece, _ in cut.pre_tokenize_str("They'll seeTheCAMEL 12345/")]
    assert pieces == ["They'll", "Ġsee", "The", "CAMEL", "Ġ", "123", "45", "/"]


@pytest.mark.parametrize(
    ("pre_tokenizer", "pieces"),
    [
        ("deepseek-v3", ["It", "'s", " costs", " ", "123", "45", " ", "東京ア", "b", " (", "x", ")\n"]),
        ("kimi-k2", ["It's", " costs", " ", "123", "45", " ", "東京", "アb", " (", "x", ")\n"]),
        ("seed-coder", ["It", "'s", " costs", " ", "1", "2", "3", "4", "5", " 東京アb", " (", "x", ")", "\n"]),
    ],
)
def test_text_is_cut_by_the_expressions_of_the_pre_tokenizer(
    pre_tokenizer: str, pieces: list[str], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer=pre_tokenizer))
    cut = Tokenizer.from_str(json.dumps(tokenizer_json(open_gguf(tmp_path / "tiny.gguf")))).pre_tokenizer
    text = "It's costs 12345 東京アb (x)\n"
    assert [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)] == pieces


def test_a_qwen_tokenizer_composes_characters(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer="qwen2"))
    tokenizer = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache").tokenizer()
    assert tokenizer.encode("e\u0301", first=True) == tokenizer.encode("é", first=True)


@pytest.mark.parametrize(("pre_tokenizer", "added"), [("llama-bpe", True), ("qwen2", False), ("tekken", True)])
def test_bos_follows_the_kind_of_tokenizer_where_the_file_does_not_say(
    pre_tokenizer: str, added: bool, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", replace(BY_NAME["qwen2"], pre_tokenizer=pre_tokenizer))
    tokenizer = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache").tokenizer()
    assert (tokenizer.bos_id == tokenizer.special_ids["<s>"]) == added
    assert (tokenizer.bos_id is None) == (not added)


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def test_merges_are_never_recovered_for_control_tokens() -> None:
    tokens = ["<", "s", ">", "<s>", "<s", "s>", "ss"]
    merges = recover_merges(tokens, [1, 1, 1, 3, 1, 1, 1], [0.0] * 7)
    assert ["<", "s>"] not in merges
    assert ["<s", ">"] not in merges
    assert ["s", "s"] in merges


# ----------------------------------------------------------------------------------- bad files


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, BY_NAME["llama"])
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_refused_with_its_name(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(content[:length])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        open_gguf(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_still_a_model(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    header = open_header_length(content, folder)
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 1))
        changed[place] = data.draw(st.integers(0, 255))
    path = folder / "damaged.gguf"
    path.write_bytes(changed)
    refusal = ""
    try:
        names = set(open_model(path, cache=folder / "cache").tensors)
    except UmbelError as error:
        names, refusal = set(), str(error)
    assert "damaged.gguf" in refusal or "model.embed_tokens.weight" in names


def open_header_length(content: bytes, folder: Path) -> int:
    whole = folder / "whole.gguf"
    if not whole.exists():
        whole.write_bytes(content)
    return open_gguf(whole).header_bytes


def rewritten(path: Path, family: str, change: dict[str, object]) -> Path:
    """A GGUF of a family with some metadata replaced."""
    original = BY_NAME[family]
    write_gguf(path, replace(original, metadata={**original.metadata, **change}))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, r"'llama\.expert_used_count' should be an integer"),
        ({"rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, r"rope\.scaling\.factor is 0\.0"),
        ({"rope.scaling.type": "yarn"}, r"'llama\.rope\.scaling\.factor' should be a number, it is missing"),
        ({"rope.dimension_count": 16}, "16 rotated dimensions"),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_opened(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = rewritten(tmp_path / "odd.gguf", "llama", change)
    with pytest.raises(ModelError, match=message):
        open_model(path, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists(), "nothing is written for a model that cannot be run"


def test_experts_of_an_architecture_without_them_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "odd.gguf", "qwen2", {"expert_count": 8})
    with pytest.raises(ModelError, match="experts of a qwen2 model are not supported as GGUF"):
        open_model(path, cache=tmp_path / "cache")


def bare(path: Path, architecture: str, kind: str = "") -> Path:
    """A file with one tensor. `kind`: its general.type."""
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = bare(tmp_path / "other.gguf", "bloom")
    with pytest.raises(ModelError, match=r"'bloom' is not supported.*llama, mistral, qwen2, .*, gemma3n, gemma4, phi3"):
        open_model(path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("clip", "", r"other\.gguf is the tower of a vision model.*; give the model's own file"),
        ("clip", "mmproj", "is the tower of a vision model"),
        ("llama", "adapter", r"is a LoRA adapter; .* Runtime\(MODEL, adapters={NAME: FOLDER}\)"),
        ("llama", "imatrix", "is a table of importances"),
    ],
)
def test_a_file_that_holds_no_language_model_is_named(
    architecture: str, kind: str, message: str, tmp_path: Path
) -> None:
    path = bare(tmp_path / "other.gguf", architecture, kind)
    with pytest.raises(ModelError, match=message):
        open_model(path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("number", "shown"), [(40, r"NVFP4 \(40\)"), (28, r"F64 \(28\)"), (4, "4"), (2**32 - 1, "4294967295")]
)
def test_a_tensor_of_another_type_is_named_with_it(number: int, shown: str, tmp_path: Path) -> None:
    path = bare(tmp_path / "other.gguf", "llama")
    content = bytearray(path.read_bytes())
    info = content.index(b"token_embd.weight") + len(b"token_embd.weight")
    content[info + 20 : info + 24] = number.to_bytes(4, "little")  # after the number of dimensions and two of them
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"'token_embd.weight' is of type {shown}, which cannot be dequantised here"):
        open_gguf(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, BY_NAME["llama"])
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"'blk\.7\.ffn_up\.weight'"):
        open_model(path, cache=tmp_path / "cache")


def test_a_file_of_something_else_is_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("these are notes, and long enough to have a header")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_model(path, cache=tmp_path / "cache")


def test_big_endian_files_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(32))
    with pytest.raises(ModelError, match="big-endian"):
        open_model(path, cache=tmp_path / "cache")


def test_an_unknown_pre_tokenizer_is_refused_rather_than_guessed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, BY_NAME["qwen2"])
    path.write_bytes(path.read_bytes().replace(b"\x07\0\0\0\0\0\0\0default", b"\x07\0\0\0\0\0\0\0unknown"))
    with pytest.raises(ModelError, match="pre-tokenizer 'unknown' is not supported"):
        open_model(path, cache=tmp_path / "cache")


def test_a_tokenizer_json_is_readable_by_the_library(tmp_path: Path) -> None:
    for family in FAMILIES[:2]:
        path = tmp_path / f"{family.name[:5]}{len(family.name)}.gguf"
        write_gguf(path, family)
        source = open_model(path, cache=tmp_path / "cache")
        again = Tokenizer.from_str(source.documents.tokenizer().decode())
        assert again.encode("the").ids == family.tokenizer().encode("the").ids
        assert source.eos_ids == {again.token_to_id("</s>"), again.token_to_id("<|im_end|>")}


def test_overlapping_tensors_are_refused(content: bytes, tmp_path: Path) -> None:
    """The second tensor's offset becomes that of the first, 0."""
    (tmp_path / "whole.gguf").write_bytes(content)
    first, second, *_ = sorted(open_gguf(tmp_path / "whole.gguf").tensors.values(), key=lambda tensor: tensor.offset)
    name = content.index(second.name.encode())
    place = name + len(second.name) + 4 + 8 * len(second.shape) + 4
    assert int.from_bytes(content[place : place + 8], "little") == second.offset - first.offset
    (tmp_path / "odd.gguf").write_bytes(content[:place] + bytes(8) + content[place + 8 :])
    with pytest.raises(ModelError, match=r"odd\.gguf is damaged: tensors '.*' and '.*' overlap"):
        open_gguf(tmp_path / "odd.gguf")


# --------------------------------------------------------------------------------- several files


def split(path: Path, names: tuple[str, ...], *, count: int = 0, promised: int = 0) -> list[Path]:
    """Writes the file at `path` as llama.cpp's splits of these names, and removes it: metadata in the first one."""
    whole = gguf.GGUFReader(path)
    tensors = list(whole.tensors)
    size = -(-len(tensors) // len(names))
    paths = [path.with_name(name) for name in names]
    for number, target in enumerate(paths):
        writer = gguf.GGUFWriter(target, "llama")
        for key, entry in whole.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                sub_type = entry.types[1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, entry.contents(), entry.types[0], sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count or len(names))
        writer.add_int32("split.tensors.count", promised or len(tensors))
        for tensor in tensors[number * size : (number + 1) * size]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    return paths


THREE = tuple(f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3))


def test_the_first_of_several_files_opens_all_of_them(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(content)
    expected = dict(open_model(tmp_path / "whole.gguf", cache=tmp_path / "cache").tensors)
    paths = split(tmp_path / "whole.gguf", THREE)
    source = open_model(paths[0], cache=tmp_path / "cache")
    assert source.files == tuple(paths)
    assert {name: tensor.tolist() for name, tensor in source.tensors.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    before = source.fingerprint
    paths[2].touch()
    assert open_model(paths[0], cache=tmp_path / "cache").fingerprint != before


def test_a_later_part_is_answered_with_the_first(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(content)
    _, second, _ = split(tmp_path / "whole.gguf", THREE)
    with pytest.raises(ModelError, match=r"is part 2 of 3 of a model; give the first one, .*tiny-00001-of-00003\.gguf"):
        open_gguf(second)


def test_a_missing_part_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(content)
    first, second, _ = split(tmp_path / "whole.gguf", THREE)
    second.unlink()
    with pytest.raises(ModelError, match=r"lacks tiny-00002-of-00003\.gguf; download the whole model"):
        open_model(first, cache=tmp_path / "cache")


def test_parts_of_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(content)
    first, second, third = split(tmp_path / "whole.gguf", THREE)
    whole = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf is no part 2 of .*says another part"):
        open_model(first, cache=tmp_path / "cache")
    second.write_bytes(whole)
    for target in (first, second):  # both have another count than their names
        name = b"split.count"
        place = target.read_bytes().index(name) + len(name) + 4
        target.write_bytes(target.read_bytes()[:place] + b"\x02" + target.read_bytes()[place + 1 :])
    with pytest.raises(ModelError, match=r"part 1 of 2 by its metadata; .*NAME-00001-of-00002\.gguf"):
        open_model(first, cache=tmp_path / "cache")


def test_parts_with_fewer_tensors_than_promised_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(content)
    first, *_ = split(tmp_path / "whole.gguf", THREE, promised=99)
    with pytest.raises(ModelError, match=r"hold \d+ tensors, not 99"):
        open_model(first, cache=tmp_path / "cache")


# Pieces that end with a page are mapped, others are read.
PAGES = st.integers(1, 20).map(lambda pages: pages * mmap.ALLOCATIONGRANULARITY)
CUTS = st.one_of(st.sets(PAGES, max_size=4), st.sets(st.integers(1, 80_000), max_size=4))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_pieces_of_one_file_hold_what_the_whole_holds(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "whole.gguf").write_bytes(content)
    whole = open_gguf(folder / "whole.gguf")
    cuts = sorted(data.draw(CUTS))
    places = [0, *cuts, len(content)]
    paths = [folder / f"piece{number}" for number in range(len(places) - 1)]
    for path, (start, end) in zip(paths, itertools.pairwise(places), strict=True):
        path.write_bytes(content[start:end])
    for name, tensor in open_pieces(paths, folder / "pieces.gguf").tensors.items():
        assert np.array_equal(tensor.mapped(), whole.tensors[name].mapped())
        assert np.array_equal(tensor.read(0, tensor.rows), tensor.mapped())


def test_a_file_that_became_shorter_is_an_error_of_the_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    tensors = open_model(path, cache=tmp_path / "cache").tensors
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ModelError, match=r"short\.gguf has become shorter"):
        tensors["model.layers.1.mlp.up_proj.weight"]
