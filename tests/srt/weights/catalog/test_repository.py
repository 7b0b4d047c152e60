"""Names of repositories, and which of their files make a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.lang.errors import ModelError
from umbel.srt.weights.catalog.repository import (
    HubName,
    files_to_download,
    gguf_choices,
    gigabytes,
    parse_hub_name,
    the_gguf,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUANTISED = {
    "Model-Q4_K_M.gguf": 800_000_000,
    "Model-UD-Q4_K_M.gguf": 790_000_000,
    "Model-IQ4_XS.gguf": 700_000_000,
    "Q8_0/Model-Q8_0-00001-of-00002.gguf": 900_000_000,
    "Q8_0/Model-Q8_0-00002-of-00002.gguf": 400_000_000,
    "mmproj-Model-F16.gguf": 100_000_000,
    "README.md": 10,
}
FOLDER = {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 9}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/repo:Q4_K_M", HubName("org/repo", "main", "Q4_K_M")),
        ("org/repo@v1.0:Q8_0", HubName("org/repo", "v1.0", "Q8_0")),
        (f"org/repo@{COMMIT}", HubName("org/repo", COMMIT)),
        ("org/repo@refs/pr/3", HubName("org/repo", "refs/pr/3")),
        ("hf.co/org/repo:model-Q4_0.gguf", HubName("org/repo", "main", "model-Q4_0.gguf")),
        ("https://huggingface.co/org/repo/", HubName("org/repo")),
    ],
)
def test_names_are_read_and_written(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["repo", "a/b/c", "../repo", "org/..", "org/re--po", "org/repo@../x", "org/repo@", "org/repo:", "/a/b", "a b/c"],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert parse_hub_name(text) is None


@given(st.text(max_size=30))
def test_a_name_never_leads_out_of_the_cache(text: str) -> None:
    name = parse_hub_name(f"org/{text}")
    assert name is None or ("/" not in name.folder and ".." not in name.folder + name.revision)


def test_gguf_files_are_grouped_by_parts_and_labelled_by_quantisation() -> None:
    choices = gguf_choices(QUANTISED)
    assert {choice.label: len(choice.files) for choice in choices} == {
        "Q4_K_M": 1,
        "UD-Q4_K_M": 1,
        "IQ4_XS": 1,
        "Q8_0": 2,
    }
    assert all(choice.whole for choice in choices)
    assert [choice.whole for choice in gguf_choices({"a-00001-of-00002.gguf": 1})] == [False]


@pytest.mark.parametrize(
    ("tag", "first"),
    [
        ("Q4_K_M", "Model-Q4_K_M.gguf"),
        ("q4_k_m", "Model-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "Model-UD-Q4_K_M.gguf"),
        ("Q8_0", "Q8_0/Model-Q8_0-00001-of-00002.gguf"),
        ("Model-IQ4_XS.gguf", "Model-IQ4_XS.gguf"),
        ("Model-IQ4_XS", "Model-IQ4_XS.gguf"),
    ],
)
def test_a_tag_names_one_file(tag: str, first: str) -> None:
    assert the_gguf(f"org/repo:{tag}", gguf_choices(QUANTISED), tag).files[0] == first


def test_a_tag_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(
        ModelError, match=r"org/repo has no GGUF file 'Q5_K_M'; it has .*IQ4_XS \(700 MB\).*Q8_0 \(1.3 GB\)"
    ):
        the_gguf("org/repo:Q5_K_M", gguf_choices(QUANTISED), "Q5_K_M")
    with pytest.raises(ModelError, match=r"org/repo has several GGUF files: .*; write org/repo:TAG"):
        the_gguf("org/repo", gguf_choices(QUANTISED), "")
    twice = {"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 1}
    with pytest.raises(ModelError, match=r"several GGUF files that 'Q4_0' may mean: a-Q4_0.gguf .*, b-Q4_0.gguf"):
        the_gguf("org/repo:Q4_0", gguf_choices(twice), "Q4_0")
    with pytest.raises(ModelError, match="org/repo has no GGUF files, so 'Q4_0' names nothing in it; write org/repo"):
        the_gguf("org/repo:Q4_0", [], "Q4_0")


def test_only_what_a_model_needs_is_downloaded() -> None:
    more = {
        "modeling.py": 1,
        "pytorch_model.bin": 9,
        "training_args.bin": 1,
        "merges.txt": 1,
        "LICENSE.txt": 1,
        "chat_template.jinja": 1,
        "tokenizer.model": 1,
        "onnx/model.onnx": 9,
        "original/config.json": 1,
        "consolidated.safetensors": 9,
    }
    small, weights = files_to_download(HubName("org/repo"), FOLDER | more)
    assert small == ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json", "tokenizer.model"]
    assert weights == ["model.safetensors"]


def test_shards_are_downloaded_by_their_index() -> None:
    files = {"config.json": 1, "tokenizer.json": 1, "model.safetensors.index.json": 1, "consolidated.safetensors": 9}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    small, weights = files_to_download(HubName("org/repo"), files | dict.fromkeys(shards, 5))
    assert "model.safetensors.index.json" in small
    assert weights == shards


def test_a_tag_downloads_the_parts_of_its_file_and_nothing_else() -> None:
    parts = ["Q8_0/Model-Q8_0-00001-of-00002.gguf", "Q8_0/Model-Q8_0-00002-of-00002.gguf"]
    assert files_to_download(HubName("org/repo", "main", "Q8_0"), QUANTISED | FOLDER) == ([], parts)
    assert files_to_download(HubName("org/repo"), {"m-Q4_0.gguf": 1, "config.json": 1}) == ([], ["m-Q4_0.gguf"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": 1, "pytorch_model.bin": 9}, "pytorch_model.bin, which can run code when loaded"),
        ({"README.md": 1}, "neither safetensors nor GGUF"),
        ({"config.json": 1, "model.safetensors": 9}, "no tokenizer.json"),
        ({"adapter_model.safetensors": 9, "tokenizer.json": 1}, "no config.json"),
        ({"m-Q4_0-00001-of-00002.gguf": 1}, "only some parts"),
    ],
)
def test_a_repository_without_a_model_says_why(files: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        files_to_download(HubName("org/repo"), files)


def test_sizes_are_written_as_people_read_them() -> None:
    assert [gigabytes(size) for size in (12, 4_000, 270_000_000, 1_310_000_000)] == [
        "12 bytes",
        "4 kB",
        "270 MB",
        "1.3 GB",
    ]
