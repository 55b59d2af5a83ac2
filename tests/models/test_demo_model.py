"""The embedded demo model: its files agree with each other and with what the model card says."""

import ast
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from support.checkpoints.demo import DEMO

STACK = (
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n'
    "        self._items = []\n\n    def push(self, item):\n"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return read_json("config.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def read_json(name: str) -> dict[str, Any]:
    return json.loads((DEMO / name).read_text())


def source_of(module: str) -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    return root.joinpath(*module.split(".")).with_suffix(".py").read_bytes()


def test_weights_fit_into_16_mib_and_8_million_bf16_parameters() -> None:
    path = DEMO / "model.safetensors"
    assert path.stat().st_size <= 16 * 2**20
    with safe_open(path, framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 5_000_000 < sum(tensor.numel() for tensor in tensors) <= 8_000_000
    assert all(tensor.isfinite().all() for tensor in tensors)


def test_weights_have_exactly_the_tensors_of_a_tied_llama(config: dict[str, Any]) -> None:
    layer = [f"self_attn.{p}_proj" for p in "qkvo"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += ["input_layernorm", "post_attention_layernorm"]
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    for i in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{i}.{name}.weight" for name in layer}
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        assert set(weights.keys()) == expected
        embedding = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert embedding == [config["vocab_size"], config["hidden_size"]]


def test_config_is_a_llama_with_heads_of_64(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] * 64 == config["hidden_size"]
    assert config["tie_word_embeddings"] is True


def test_tokenizer_and_configs_agree(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    settings = read_json("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))
    assert settings["model_max_length"] == config["max_position_embeddings"]
    for name in ("bos", "eos", "pad"):
        token_id = tokenizer.token_to_id(settings[f"{name}_token"])
        assert config[f"{name}_token_id"] == token_id
        assert read_json("generation_config.json")[f"{name}_token_id"] == token_id


def test_encoding_begins_with_bos_only_where_special_tokens_are_asked_for(
    config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("x = 1\n").ids
    assert ids[0] == config["bos_token_id"]
    assert tokenizer.encode("x = 1\n", add_special_tokens=False).ids == ids[1:]


@pytest.mark.parametrize("module", ["argparse", "email.contentmanager", "this", "weakref"])
def test_tokenizer_gives_back_every_byte_of_real_sources(tokenizer: Tokenizer, module: str) -> None:
    source = source_of(module)
    assert tokenizer.decode(tokenizer.encode(source.decode()).ids).encode() == source


def test_tokenizer_gives_back_text_that_no_source_holds(tokenizer: Tokenizer) -> None:
    text = "\t\tx\r\n\r\n   \f日本語 \U0001f40d é\x00\x7f  \n \n   "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prompt_may_end_inside_an_indentation(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("def f(x):\n    return x").tokens
    for prompt in ("def f(x):", "def f(x):\n", "def f(x):\n    "):
        tokens = tokenizer.encode(prompt).tokens
        assert tokens == whole[: len(tokens)]


def test_chat_template_renders_messages_as_comments() -> None:
    template = ImmutableSandboxedEnvironment().from_string(
        read_json("tokenizer_config.json")["chat_template"]
    )
    text = template.render(
        messages=[
            {"role": "system", "content": "Write Python."},
            {"role": "user", "content": "A stack,\nplease."},
        ],
        bos_token="<|begin|>",
        add_generation_prompt=True,
    )
    assert text == "<|begin|># system: Write Python.\n# user: A stack,\n# please.\n# assistant:\n"
    ast.parse(text.removeprefix("<|begin|>"))


def test_transformers_tokenizer_agrees_with_the_file(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(DEMO)
    assert (
        loaded("def f(x):\n    pass\n")["input_ids"]
        == tokenizer.encode("def f(x):\n    pass\n").ids
    )
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|begin|># user: hi\n"


def test_greedy_completion_is_python_with_further_methods(model: Any, tokenizer: Tokenizer) -> None:
    prompt = torch.tensor([tokenizer.encode(STACK).ids])
    ids = model.generate(prompt, max_new_tokens=64, do_sample=False, repetition_penalty=1.1)
    text = tokenizer.decode(ids[0].tolist())
    assert text.startswith(STACK)
    # The last line and the last method may be cut off in the middle.
    tree = ast.parse(text[: text.rindex("\n    def ")])
    stack = tree.body[0]
    assert isinstance(stack, ast.ClassDef)
    methods = [node.name for node in stack.body if isinstance(node, ast.FunctionDef)]
    assert methods[:2] == ["__init__", "push"]
    assert len(methods) >= 3
    assert "self._items.append(item)" in text


def test_the_card_names_data_licence_and_measure() -> None:
    card = (DEMO / "README.md").read_text()
    for words in ("Python Software Foundation", "7,344,384", "gzip -9", "xz -9e", "NVIDIA H200"):
        assert words in card
