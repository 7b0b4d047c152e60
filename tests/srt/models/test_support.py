"""Which code runs a model, by its configuration."""

from umbel.srt.models.families import FAMILIES
from umbel.srt.models.support import RunsBy, Support, native_types, support_of, transformers_types, wanted_families
from umbel.srt.models.vision.config import TEXT_ONLY

from ..weights.tiny import BY_NAME


def test_a_family_of_the_registry_is_native_and_its_obstacle_is_said() -> None:
    config = BY_NAME["qwen3"].build(64).config.to_dict()
    assert support_of(config).by is RunsBy.NATIVE
    refused = support_of({**config, "hidden_size": -1})
    assert refused.by is RunsBy.NOTHING
    assert "hidden_size" in refused.reason


def test_layers_that_keep_another_state_are_refused_in_transformers() -> None:
    assert support_of({"model_type": "cohere"}).by is RunsBy.TRANSFORMERS
    refused = support_of({"model_type": "minimax"})
    assert (refused.by, refused.reason) == (
        RunsBy.NOTHING,
        "layer 1 is of type 'linear_attention', which has no KV cache of ours",
    )
    homemade = support_of({"model_type": "homemade", "auto_map": {"AutoConfig": "own.Config"}}).reason
    assert homemade.startswith("neither umbel nor transformers ")
    assert homemade.endswith("or install a transformers that has it. Its own code (auto_map) is never run.")
    assert "transformers does not accept" in support_of({"model_type": "cohere", "hidden_size": "wide"}).reason
    assert "no causal language model" in support_of({"model_type": "t5"}).reason


def test_an_encoder_is_refused_by_its_configuration() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    bert = {"model_type": "bert", "architectures": ["BertModel"]}
    assert support_of(bert).by is RunsBy.NOTHING
    assert support_of(bert).reason.startswith(
        "model_type 'bert' is an encoder, whose tokens see those after them; umbel"
    )
    assert support_of({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}).by is RunsBy.NOTHING
    assert "is an encoder with a decoder" in support_of({"model_type": "bart", "is_encoder_decoder": True}).reason
    assert support_of({**bert, "architectures": ["BertLMHeadModel"], "is_decoder": True}).by is RunsBy.TRANSFORMERS
    with_decoders = {"bart", "mbart", "mvp"}
    for family in MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() - with_decoders:
        assert "is an encoder" in support_of({"model_type": family}).reason, family


def test_the_text_part_of_a_vision_model_runs_and_the_rest_is_said() -> None:
    config = BY_NAME["qwen3"].build(64).config.to_dict()
    wrapper = {"model_type": "internvl", "text_config": config}
    assert support_of(wrapper) == Support(RunsBy.NATIVE, "its pictures are not read")


def test_the_table_follows_the_registry() -> None:
    rows = wanted_families()
    assert len(rows) >= 20
    assert len([row for row in rows if row.support.by is RunsBy.NOTHING]) <= 2
    for row in rows:
        assert row.support.reason or row.support.by is not RunsBy.NOTHING, row
        if row.support.by is RunsBy.NATIVE:
            assert set(row.model_types) <= set(FAMILIES) | set(TEXT_ONLY), row
    by_name = {row.name: row.support.by for row in rows}
    assert by_name["Llama 3"] is by_name["Qwen 3"] is by_name["Gemma 3"] is RunsBy.NATIVE


def test_the_two_lists_of_types_have_nothing_in_common() -> None:
    assert "llama" in native_types()
    assert "cohere" in transformers_types()
    assert not set(native_types()) & set(transformers_types())
