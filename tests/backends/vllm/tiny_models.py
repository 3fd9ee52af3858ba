"""Tiny models as folders that vLLM and transformers read."""

KINDS = ("llama", "tied", "experts")


def make_folder(kind, folder, seed=0):
    """A random model of 100,000 parameters: a llama, the same with a tied lm_head, or a Qwen3 mixture of experts."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512,
             "initializer_range": 0.2, "tie_word_embeddings": kind == "tied", "dtype": "float32",
             "bos_token_id": None, "eos_token_id": None}
    if kind == "experts":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2,
                                                   moe_intermediate_size=64, decoder_sparse_step=1))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.float().eval().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
