"""Converts GGUF metadata to a Hugging Face config dict, for the architectures whose tensors are known.

GGUF stores the values that llama.cpp needs to run a model. Values that llama.cpp derives (layer types of Gemma 3, the
parameters of Llama 3's precomputed RoPE factors) are derived here too and, where the file has the result, checked
against it.
"""

from dataclasses import dataclass
from statistics import NormalDist

from ...lang.errors import ModelError
from .gguf_architectures import Architecture, Keys, architecture_of, decimal
from .gguf_file import GgufFile
from .gguf_hybrids import hybrid_config
from .gguf_rope import Config, proportional_part, rope_scaling

GEMMA3_SLIDING_PATTERN = 6  # every sixth layer attends to everything
GEMMA2_27B_LAYERS = 46  # this and the following: the one size whose queries are not scaled by head_dim
GEMMA3_27B_LAYERS = 62
GEMMA3_LOCAL_ROPE = 10_000.0
EXAONE4_32B_LAYERS = 64  # the size that has windows, also where its file does not state them
EXAONE4_32B_WINDOW = 4096
LLAMA4_CHUNK = 8192  # of all models, as llama.cpp has it; the length from which queries are scaled, too
LLAMA4_BARE_EXPERTS = 128  # of the one size whose queries and keys are not normalised
GLM47_LITE = (154_880, (47, 48))  # tokens and layers of a model whose early files do not state how it scores experts
SIGMOID = 2  # of `expert_gating_func`


@dataclass(frozen=True, slots=True)
class FileExperts:
    """The experts of a file: those of `Architecture.experts`, in numbers."""

    count: int
    chosen: int
    width: int
    shared_width: int  # 0: there is no MLP that every token uses
    first: int  # layers before this one have dense MLPs,
    step: int  # and so have all but every so-manieth

    def are_in(self, layer: int) -> bool:
        return layer >= self.first and (layer + 1) % self.step == 0


def experts_of(gguf: GgufFile, architecture: Architecture) -> FileExperts | None:
    """Reads the sizes of the experts; None: all MLPs are dense.

    Raises:
        ModelError: sizes that are missing or impossible.
    """
    spelling = architecture.experts
    if spelling is None:
        return None
    read = Keys(gguf.metadata, architecture.name)
    stated = "expert_feed_forward_length"
    width = read.integer(stated if read.has(stated) else "feed_forward_length", 0)
    shared_width = 0
    if spelling.shared is not None and read.has("expert_shared_feed_forward_length"):
        shared_width = read.integer("expert_shared_feed_forward_length")
    elif architecture.latent:
        shared_width = width * read.integer("expert_shared_count")
    elif spelling.shared is not None and architecture.model_type != "granitemoe":  # which may have none
        shared_width = width if architecture.model_type == "llama4_text" else read.integer("feed_forward_length")
    experts = FileExperts(
        count=read.integer("expert_count"),
        chosen=read.integer("expert_used_count"),
        width=width,
        shared_width=shared_width,
        first=read.integer("leading_dense_block_count", 0),
        step=read.integer("interleave_moe_layer_step", 1),
    )
    sound = min(experts.width, experts.chosen, experts.step) > 0 and min(experts.shared_width, experts.first) >= 0
    if not sound or experts.chosen > experts.count:
        raise ModelError(
            f"{gguf.path} is damaged: {experts.chosen} of {experts.count} experts of {experts.width} numbers, from "
            f"layer {experts.first} in steps of {experts.step}; download it again"
        )
    return experts


def config_of(gguf: GgufFile) -> Config:
    """Builds the config.json that Hugging Face would have for this file."""
    architecture = architecture_of(gguf)
    read = Keys(gguf.metadata, architecture.name)
    hidden = read.integer("embedding_length")
    heads = read.integer("attention.head_count")
    layers = read.integer("block_count") - read.integer("nextn_predict_layers", 0)
    if heads < 1 or hidden < 1 or not 0 < layers <= len(gguf.tensors):
        raise ModelError(
            f"{gguf.path} is damaged: {layers} layers of {heads} attention heads and a width of {hidden} "
            f"in {len(gguf.tensors)} tensors"
        )
    head_dim = read.integer("attention.key_length", read.integer("rope.dimension_count", hidden // heads))
    if not architecture.latent and not architecture.layers_differ:
        _check_head_dim(gguf, read, head_dim, rotates_part=architecture.rotates_part)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path} holds no embedding 'token_embd.weight'; give a GGUF of a whole language model")
    recurrent = architecture.recurrent is not None
    by_layer = architecture.layers_differ or recurrent
    widths, kv_heads = (
        read.by_layer(key, layers, default) if by_layer else [read.integer(key, default)]
        for key, default in (("feed_forward_length", None), ("attention.head_count_kv", heads))
    )
    config: Config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": max(widths) if recurrent else widths[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads[0],
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.decimal("rope.freq_base", 10_000.0),
        "rope_scaling": None if architecture.layers_differ else rope_scaling(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in gguf.metadata:
            config[f"{ours}_token_id"] = gguf.metadata.integer(key)
    config.update(_classifier(gguf))
    experts = experts_of(gguf, architecture)
    config.update(_particulars(gguf, architecture, read, config) if experts is None else _sparse(read, config, experts))
    if recurrent:
        config.update(hybrid_config(architecture, read, layers))
    return config


CLASSIFIER = "cls.output.weight"


def _classifier(gguf: GgufFile) -> Config:
    """Describes the classifier of a reranker; {} without one. Its rows are named in the order of the file."""
    tensor = gguf.tensors.get(CLASSIFIER)
    if tensor is None:
        return {}
    key = f"{gguf.architecture}.classifier.output_labels"
    labels = list(gguf.metadata.texts(key)) if key in gguf.metadata else [""] * tensor.shape[0]
    if len(labels) != tensor.shape[0]:
        raise ModelError(f"{gguf.path} is damaged: {len(labels)} labels for {tensor.shape[0]} rows of {CLASSIFIER!r}")
    model_class = architecture_of(gguf).model_class.replace("ForCausalLM", "ForSequenceClassification")
    return {"architectures": [model_class], "id2label": {str(row): label for row, label in enumerate(labels)}}


_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}


def pooling_of(gguf: GgufFile) -> str | None:
    """Returns how a file's vectors are pooled, as modules.json spells it; None: it does not say."""
    stated = gguf.metadata.integer(f"{gguf.architecture}.pooling_type", 0)
    return _POOLINGS.get(stated, str(stated)) if stated else None


def _particulars(gguf: GgufFile, architecture: Architecture, read: Keys, config: Config) -> Config:
    match architecture.model_type:
        case "llama":
            return {"hidden_act": "silu", "mlp_bias": False}
        case "mistral" if read.has("attention.temperature_scale"):
            return _ministral3(read, config)
        case "mistral":
            window = read.integer("attention.sliding_window", 0)
            return {"hidden_act": "silu", "sliding_window": window or None}
        case "qwen2" | "qwen3":
            return {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None}
        case "gemma":
            return {"hidden_act": "gelu_pytorch_tanh"}
        case "gemma2":
            return _gemma2(read, config)
        case "gemma3_text":
            return _gemma3(read, config)
        case "gemma3n_text":
            return _gemma3n(gguf, read, config)
        case "gemma4_text":
            return _gemma4(gguf, read)
        case "exaone4":
            usual = EXAONE4_32B_WINDOW if config["num_hidden_layers"] == EXAONE4_32B_LAYERS else 0
            window = read.integer("attention.sliding_window", usual)
            kinds = _sliding_layers(read, 4 if window else 1)
            return {"hidden_act": "silu", "sliding_window": window or None, "layer_types": kinds}
        case "seed_oss":
            return {"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False}
        case "phi3":
            window = read.integer("attention.sliding_window", 0)
            original = read.integer("rope.scaling.original_context_length", read.integer("context_length"))
            return {
                "hidden_act": "silu",
                "sliding_window": window or None,
                "original_max_position_embeddings": original,
                "partial_rotary_factor": _rotated_part(read, config),
            }
        case "smollm3":
            return {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
        case "olmo2":
            return _olmo(read, config)
        case "granite":
            return {"hidden_act": "silu", "mlp_bias": False, **_granite(read)}
        case "glm4":
            return {"hidden_act": "silu", "partial_rotary_factor": _rotated_part(read, config)}
        case "lfm2":
            return {}
        case "nemotron_h":
            return {"mlp_hidden_act": "relu2"}
        case "granitemoehybrid":
            width = read.integer("expert_shared_feed_forward_length", read.integer("feed_forward_length", 0))
            sizes = {"intermediate_size": width, "shared_intermediate_size": width}
            return {"hidden_act": "silu", "num_local_experts": 0, **sizes, **_granite(read)}
        case "qwen3_5_text":
            return {"hidden_act": "silu", "partial_rotary_factor": _rotated_part(read, config)}
        case other:
            raise AssertionError(f"no particulars for {other}")


def _sparse(read: Keys, config: Config, experts: FileExperts) -> Config:
    """Returns what only models with experts have."""
    model_type = config["model_type"]
    count = "n_routed_experts" if model_type in ("deepseek_v3", "nemotron_h") else "num_experts"
    if model_type in ("mixtral", "granitemoe", "granitemoehybrid", "gpt_oss", "llama4_text"):
        count = "num_local_experts"
    found: Config = {"hidden_act": "silu", count: experts.count, "num_experts_per_tok": experts.chosen}
    match model_type:
        case "mixtral":
            return {**found, "intermediate_size": experts.width, "sliding_window": None}
        case "qwen2_moe":
            shared = {"shared_expert_intermediate_size": experts.shared_width, "qkv_bias": config["attention_bias"]}
            return {**found, **shared, "moe_intermediate_size": experts.width, "norm_topk_prob": False}
        case "qwen3_moe":
            return {**found, "moe_intermediate_size": experts.width, "norm_topk_prob": True}
        case "granitemoe":
            kind = {"model_type": "granitemoeshared"} if experts.shared_width else {}
            sizes = {"intermediate_size": experts.width, "shared_intermediate_size": experts.shared_width}
            return {**found, **kind, **sizes, **_granite(read)}
        case "granitemoehybrid":
            sizes = {"intermediate_size": experts.width, "shared_intermediate_size": experts.shared_width}
            return {**found, **sizes, **_granite(read)}
        case "qwen3_next" | "qwen3_5_moe_text":
            shared = {"shared_expert_intermediate_size": experts.shared_width, "norm_topk_prob": True}
            rotated = {"partial_rotary_factor": _rotated_part(read, config)}
            return {**found, **shared, **rotated, "moe_intermediate_size": experts.width}
        case "nemotron_h":
            return {**found, **_nemotron(read, experts)}
        case "gpt_oss":
            return {**found, "intermediate_size": experts.width, **_gpt_oss(read, config)}
        case "llama4_text":
            return {**found, **_llama4(read, config, experts)}
        case "deepseek_v3":
            return {**found, "moe_intermediate_size": experts.width, **_deepseek(read, config, experts)}
        case other:
            raise AssertionError(f"no experts for {other}")


def _gpt_oss(read: Keys, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return {
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": _sliding_layers(read, 2),
        "rope_scaling": {**scaling, "truncate": False} if isinstance(scaling, dict) else {"rope_type": "default"},
    }


def _llama4(read: Keys, config: Config, experts: FileExperts) -> Config:
    layers = read.integer("block_count")
    chunked = read.integer("attention.sliding_window", LLAMA4_CHUNK) > 0
    rotates = [not chunked or (layer + 1) % 4 != 0 for layer in range(layers)]
    return {
        "intermediate_size": experts.width,
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": experts.step,
        "attention_chunk_size": LLAMA4_CHUNK,
        "floor_scale": LLAMA4_CHUNK,
        "no_rope_layers": [int(rotated) for rotated in rotates],
        "layer_types": ["chunked_attention" if chunked and rotated else "full_attention" for rotated in rotates],
        "use_qk_norm": experts.count != LLAMA4_BARE_EXPERTS,
    }


def _deepseek(read: Keys, config: Config, experts: FileExperts) -> Config:
    """Reads latent attention in both layouts: older files have the head sizes of expanded keys, newer ones those of
    latents, and the former in keys of their own."""
    rotated = read.integer("rope.dimension_count")
    key = "attention.key_length_mla" if read.has("attention.key_length_mla") else "attention.key_length"
    value = "attention.value_length_mla" if read.has("attention.value_length_mla") else "attention.value_length"
    sizes = {
        "q_lora_rank": read.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": read.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": read.integer(key) - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": read.integer(value),
    }
    wrong = next((f"{name}={size}" for name, size in sizes.items() if size is not None and size < 1), None)
    if wrong is not None or rotated % 2:
        raise ModelError(
            f"{read.metadata.path} is damaged: {wrong or f'{rotated} rotated numbers'} of latent attention; "
            "download it again"
        )
    tokens, layers = GLM47_LITE
    is_glm = config["vocab_size"] == tokens and config["num_hidden_layers"] in layers
    if read.integer("expert_gating_func", SIGMOID if is_glm else 0) != SIGMOID:
        raise ModelError(
            f"{read.metadata.path}: DeepSeek V2, which scores experts by softmax, is not supported as GGUF; use a "
            "DeepSeek V3 or Kimi K2 file, or the model's safetensors folder"
        )
    return {
        **sizes,
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "first_k_dense_replace": min(experts.first, read.integer("block_count")),
        "n_shared_experts": experts.shared_width // experts.width,
        "n_group": read.integer("expert_group_count", 1),
        "topk_group": read.integer("expert_group_used_count", 1),
        "routed_scaling_factor": read.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": read.flag("expert_weights_norm", False),
        "num_nextn_predict_layers": 0,
    }


def _nemotron(read: Keys, experts: FileExperts) -> Config:
    if read.integer("moe_latent_size", 0):
        raise ModelError(
            f"{read.metadata.path}: experts on latents are not supported; use a Nemotron-H model without them"
        )
    return {
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared_width,
        "n_group": read.integer("expert_group_count", 1),
        "topk_group": read.integer("expert_group_used_count", 1),
        "routed_scaling_factor": read.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": read.flag("expert_weights_norm", True),
    }


def _sliding_layers(read: Keys, period: int) -> list[str]:
    """Returns the kinds of layers: as listed, or every n-th is full, by the file's n or that of the architecture."""
    layers = read.integer("block_count")
    listed = read.flags("attention.sliding_window_pattern", layers)
    if listed is None:
        every = read.integer("attention.sliding_window_pattern", period)
        listed = [every < 1 or (layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in listed]


def _granite(read: Keys) -> Config:
    return {
        "embedding_multiplier": read.decimal("embedding_scale", 1.0),
        "residual_multiplier": read.decimal("residual_scale", 1.0),
        "attention_multiplier": read.decimal("attention.scale", 1.0),
        "logits_scaling": read.decimal("logit_scale", 1.0),
    }


def _gemma3(read: Keys, config: Config) -> Config:
    layers = read.integer("block_count")
    heads = read.integer("attention.head_count")
    whole_width_scale = layers == GEMMA3_27B_LAYERS
    softcap = read.positive("final_logit_softcapping") if read.has("final_logit_softcapping") else None
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": read.integer("embedding_length") // heads if whole_width_scale else config["head_dim"],
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % GEMMA3_SLIDING_PATTERN == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "rope_local_base_freq": read.positive("rope.freq_base_swa", GEMMA3_LOCAL_ROPE),
        "rope_theta": read.positive("rope.freq_base", 1_000_000.0),
        "final_logit_softcapping": softcap,
        "attn_logit_softcapping": None,
    }


def _gemma2(read: Keys, config: Config) -> Config:
    layers, heads = read.integer("block_count"), read.integer("attention.head_count")
    whole_width_scale = layers == GEMMA2_27B_LAYERS
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": read.integer("embedding_length") // heads if whole_width_scale else config["head_dim"],
        "sliding_window": read.integer("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "final_logit_softcapping": read.positive("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": read.positive("attn_logit_softcapping", 50.0),
    }


def _olmo(read: Keys, config: Config) -> Config:
    """Reads OLMo 2, and OLMo 3, which has its architecture and a window."""
    window = read.integer("attention.sliding_window", 0)
    if not window:
        return {"hidden_act": "silu"}
    scaling, plain = config["rope_scaling"], {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**plain, **scaling} if isinstance(scaling, dict) else plain,
            "sliding_attention": plain,
        },
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "hidden_act": "silu",
        "sliding_window": window,
        "layer_types": _sliding_layers(read, 4),
    }


def _ministral3(read: Keys, config: Config) -> Config:
    scaling = config["rope_scaling"]
    if not isinstance(scaling, dict) or "original_max_position_embeddings" not in scaling:
        raise ModelError(
            f"{read.metadata.path} scales queries by their position, and states no original context length with YaRN; "
            "convert the model again with a current llama.cpp"
        )
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "hidden_act": "silu",
        "sliding_window": None,
        "rope_scaling": {**scaling, "llama_4_scaling_beta": read.decimal("attention.temperature_scale")},
    }


def _gemma3n(gguf: GgufFile, read: Keys, config: Config) -> Config:
    """Reads Gemma 3n, whose sparsity the file states as deviations above the mean."""
    layers = read.integer("block_count")
    residual, table = (gguf.tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight"))
    scales = gguf.metadata.numbers(f"{read.prefix}.activation_sparsity_scale").tolist()
    shared = read.integer("attention.shared_kv_layers", max(0, layers - 20))
    if residual is None or table is None or len(scales) != layers or not 0 <= shared < layers:
        raise ModelError(
            f"{gguf.path} is damaged: a Gemma 3n has tensors laurel_l and per_layer_token_embd, a sparsity for each of "
            f"its {layers} layers (here {len(scales)}), and fewer layers without keys of their own (here {shared}); "
            "download it again"
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": read.by_layer("feed_forward_length", layers),
        "global_head_dim": config["head_dim"],
        "num_global_key_value_heads": config["num_key_value_heads"],
        "attention_k_eq_v": False,
        "num_kv_shared_layers": shared,
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": _sliding_layers(read, 5),
        "rope_theta": read.decimal("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": read.decimal("rope.freq_base_swa", GEMMA3_LOCAL_ROPE),
        "final_logit_softcapping": read.decimal("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": [decimal(NormalDist().cdf(float(scale))) for scale in scales],
        "altup_num_inputs": read.integer("altup.num_inputs"),
        "altup_active_idx": read.integer("altup.active_idx"),
        "altup_correct_scale": True,
        "laurel_rank": residual.shape[0],
        "hidden_size_per_layer_input": read.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
    }


def _gemma4(gguf: GgufFile, read: Keys) -> Config:
    """Reads Gemma 4, whose layers differ: the head size that others call theirs is that of full layers here."""
    layers = read.integer("block_count")
    kinds = _sliding_layers(read, 6)
    kv_heads = read.by_layer("attention.head_count_kv", layers)
    widths = read.by_layer("feed_forward_length", layers)
    full, sliding = (
        {kv_heads[layer] for layer, kind in enumerate(kinds) if kind == wanted}
        for wanted in ("full_attention", "sliding_attention")
    )
    shared = read.integer("attention.shared_kv_layers", 0)
    if len(full) != 1 or len(sliding) != 1 or kinds[-1] != "full_attention" or not 0 <= shared < layers:
        raise ModelError(
            f"{gguf.path}: layers of a Gemma 4 are of two kinds, each with one number of key heads, and the last is "
            f"full; this file has {len(full)} and {len(sliding)}, {shared} of {layers} layers without keys of their own"
        )
    first_full = kinds.index("full_attention")
    tables = gguf.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": read.integer("attention.key_length_swa"),
        "global_head_dim": read.integer("attention.key_length"),
        "num_key_value_heads": sliding.pop(),
        "num_global_key_value_heads": full.pop(),
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in gguf.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": read.decimal("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": proportional_part(gguf, read.integer("attention.key_length")),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": read.decimal("rope.freq_base_swa", 10_000.0)},
        },
        "final_logit_softcapping": (
            read.decimal("final_logit_softcapping") if read.has("final_logit_softcapping") else None
        ),
        "hidden_size_per_layer_input": read.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tables.shape[0] if tables is not None else 1,
        "enable_moe_block": False,
    }


def _rotated_part(read: Keys, config: Config) -> float:
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int), "config_of put it there"
    return read.integer("rope.dimension_count", head_dim) / head_dim


def _check_head_dim(gguf: GgufFile, read: Keys, head_dim: int, *, rotates_part: bool) -> None:
    value_dim = read.integer("attention.value_length", head_dim)
    rotated = read.integer("rope.dimension_count", head_dim)
    if rotates_part and 0 < rotated < head_dim:
        rotated = head_dim
    if head_dim < 2 or head_dim % 2 or value_dim != head_dim or rotated != head_dim:
        raise ModelError(
            f"{gguf.path}: heads of {head_dim} for keys, {value_dim} for values and {rotated} rotated dimensions; "
            "umbel runs models where the three are one even number"
        )
