"""GGUF files read back equal the transformers models they were written from."""

import json
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from umbel.lang.errors import ModelError, UmbelError
from umbel.srt.weights import ModelSource, open_model
from umbel.srt.weights.convert import to_bfloat16
from umbel.srt.weights.gguf_config import llama3_factors
from umbel.srt.weights.gguf_file import open_gguf, tensor_types
from umbel.srt.weights.gguf_tokenizer import recover_merges

from .tiny import BY_NAME, FAMILIES, LLAMA3_ROPE, Family, write_gguf


@dataclass(frozen=True)
class Converted:
    """A family's model as transformers holds it, and as it came out of a GGUF file."""

    family: Family
    model: PreTrainedModel
    source: ModelSource


@pytest.fixture(scope="module", params=BY_NAME)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    family = BY_NAME[request.param]
    folder = tmp_path_factory.mktemp("converted")
    model = write_gguf(folder / "tiny.gguf", family)
    return Converted(family, model, open_model(folder / "tiny.gguf", cache=folder / "cache"))


def test_every_parameter_comes_back_in_hugging_faces_order(converted: Converted) -> None:
    model, source = converted.model, converted.source
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(source.tensors) == set(expected)
    for parameter, value in expected.items():
        assert torch.equal(source.tensors[parameter], value.to(torch.bfloat16)), parameter


def test_the_converted_folder_gives_the_same_logits_in_transformers(converted: Converted) -> None:
    model = converted.model
    again = AutoModelForCausalLM.from_pretrained(converted.source.folder, dtype=torch.float32)
    ids = torch.arange(3, 40)[None] % model.config.vocab_size
    with torch.no_grad():
        difference = (model(ids).logits - again(ids).logits).abs().max()
    assert difference < 1e-4  # the same weights; RoPE tables may differ in the last bit


def test_the_converted_tokenizer_encodes_as_the_one_it_was_written_from(converted: Converted) -> None:
    tokenizer = converted.source.tokenizer()
    original = converted.family.tokenizer()
    for text in ("The capital of France is Paris.", "東京 naïve\n\n  spaces", "🙂 x", "<think>a"):
        assert tokenizer.encode(text, first=True) == original.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_ids == {original.token_to_id("</s>"), original.token_to_id("<|im_end|>")}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.template_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_tensors_come_back_as_the_gguf_library_dequantises_them(kind: str, tmp_path: Path) -> None:
    family = BY_NAME["llama"]
    model = write_gguf(tmp_path / "tiny.gguf", family, kind=kind)
    source = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    name = "model.layers.1.mlp.up_proj.weight"  # its rows keep their order
    raw_type = gguf.GGMLQuantizationType[kind]
    values = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[name].numpy(), raw_type), raw_type)
    assert torch.equal(source.tensors[name], torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16))


def test_every_type_that_is_listed_as_readable_can_be_dequantised() -> None:
    for name, block, block_bytes in tensor_types().values():
        if name not in ("F32", "F16"):
            zeros = np.zeros((1, block_bytes), np.uint8)
            assert gguf.quants.dequantize(zeros, gguf.GGMLQuantizationType[name]).shape == (1, block)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(5).integers(0, 2**32, 100_000, np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array([0.0, -0.0, np.inf, -np.inf, 1.00390625], np.float32)])
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(ours[number].view(torch.int16), expected[number].view(torch.int16))


def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = BY_NAME["llama, llama3 rope"].build(32).config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = LLAMA3_ROPE["rope_theta"] ** (-torch.arange(0, 32, 2).double() / 32)
    assert np.allclose(llama3_factors(500_000.0, 32, 8.0, 8192), (plain / frequencies).numpy(), rtol=1e-5)


def test_the_config_says_what_transformers_configured(converted: Converted) -> None:
    model = converted.model
    config = AutoConfig.from_pretrained(converted.source.folder)
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
        ({"expert_count": 8}, "mixtures of experts"),
        ({"rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, r"rope\.scaling\.factor is 0\.0"),
        ({"rope.scaling.type": "yarn"}, r"'llama\.rope\.scaling\.factor' should be a number, it is missing"),
        ({"rope.dimension_count": 16}, "16 rotated dimensions"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_conversion(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = rewritten(tmp_path / "odd.gguf", "llama", change)
    with pytest.raises(ModelError, match=message):
        open_model(path, cache=tmp_path / "cache")
    assert not [folder for folder in (tmp_path / "cache" / "models").iterdir() if folder.is_dir()]


def test_a_part_of_a_split_file_is_answered_with_how_to_join_them(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts; join them with: llama-gguf-split"):
        open_model(path, cache=tmp_path / "cache")


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "bloom")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'bloom' is not supported.*llama, mistral, qwen2, qwen3, gemma3"):
        open_model(path, cache=tmp_path / "cache")


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
        folder = open_model(path, cache=tmp_path / "cache").folder
        again = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert again.encode("the").ids == family.tokenizer().encode("the").ids
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
            again.token_to_id("</s>"),
            again.token_to_id("<|im_end|>"),
        ]
