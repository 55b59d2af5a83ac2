import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from support.texts.chat_templates import turns
from tokenpod.core.messages import MTP
from tokenpod.service.text.tokenizers.chat_template import (
    MAX_RANGE_STEPS,
    MAX_RENDERED_CHARS,
    ChatTemplateError,
    roles_of,
)
from tokenpod.service.text.tokenizers.draft_vocabulary import check_draft
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer, TokenizerError

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def copy_of(backend: Backend) -> Backend:
    return Backend.from_str(backend.to_str())


@pytest.fixture
def folder(tmp_path: Path, backends: dict[str, Backend]) -> Path:
    """A model's folder with a byte-level tokenizer that adds <s> to prompts."""
    backend = copy_of(backends["byte_level"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT}
    write(tmp_path / "tokenizer_config.json", config)
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer([])
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


# --- loading and encoding


def test_text_survives_encoding_and_decoding(folder):
    tokenizer = Tokenizer.load(folder)
    text = "naïve 你好 👩‍👩‍👧‍👦\n\tend "
    assert decoded(tokenizer, tokenizer.encode(text)) == text


def test_many_texts_are_encoded_as_each_alone(folder):
    tokenizer = Tokenizer.load(folder)
    texts = ["fox", "", "naïve 你好 👩‍👩‍👧‍👦", "<|user|>a", "fox " * 500]
    for special in (True, False):
        alone = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        assert tokenizer.encode_all(texts, add_special_tokens=special) == alone


def test_a_long_text_is_encoded_without_holding_up_other_threads(folder):
    tokenizer = Tokenizer.load(folder)
    thread = threading.Thread(target=tokenizer.encode_all, args=(["a fox " * 100_000],))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    # With the lock held there would be one or two: before and after.
    assert turns > 5


def test_special_tokens_are_added_only_if_asked_for(folder):
    tokenizer = Tokenizer.load(folder)
    with_bos, without = tokenizer.encode("fox"), tokenizer.encode("fox", add_special_tokens=False)
    assert with_bos == [0, *without]
    assert 0 in tokenizer.special_ids
    assert tokenizer.special_ids.isdisjoint(without)


def test_the_vocabulary_includes_added_tokens(folder, backends):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == backends["byte_level"].get_vocab_size(with_added_tokens=True)
    assert tokenizer.special_ids == {0, 1, 2}


def test_truncation_and_padding_of_the_file_are_not_applied(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    ids = Tokenizer.load(folder).encode("the lazy dog, again and again, with a naïve fox")
    assert 4 < len(ids) < 64


def test_tokens_that_only_the_configuration_knows_are_added(folder):
    size = Tokenizer.load(folder).vocab_size
    config = {
        "added_tokens_decoder": {
            str(size + 1): {"content": "<|end|>", "special": True},
            str(size): {"content": "<think>", "special": False},
        },
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|user|>", "<|image|>"],
    }
    write(folder / "tokenizer_config.json", config)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<think><|end|><pad><|image|>", add_special_tokens=False) == [
        size,
        size + 1,
        size + 2,
        size + 3,
    ]
    assert decoded(tokenizer, [size, size + 1, size + 2]) == "<think>"
    assert tokenizer.vocab_size == size + 4


def test_a_token_that_the_configuration_calls_special_is_skipped(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    token_id = backend.token_to_id("<tool call>")
    assert decoded(Tokenizer.load(folder), [token_id]) == "<tool call>"
    listed = {str(token_id): {"content": "<tool call>", "special": True}}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": listed})
    assert decoded(Tokenizer.load(folder), [token_id]) == ""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 7]}}, {2, 7}),
        ({"generation_config.json": {"eos_token_id": 2}, "config.json": {"eos_token_id": 9}}, {2}),
        ({"generation_config.json": {"eos_token_id": 0}}, {0}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, {1}),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<s>"}}, {0}),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": [9]}}, {9}),
        ({"tokenizer_config.json": {}, "config.json": {"text_config": {"eos_token_id": 8}}}, {8}),
        ({"tokenizer_config.json": {}, "config.json": {"llm_config": {"eos_token_id": 8}}}, {8}),
        (
            {
                "tokenizer_config.json": {},
                "config.json": {"thinker_config": {"text_config": {"eos_token_id": 8}}},
            },
            {8},
        ),
        ({"tokenizer_config.json": {}}, set()),
    ],
)
def test_end_of_sequence_ids_come_from_the_first_file_that_names_them(folder, files, expected):
    for name, value in files.items():
        write(folder / name, value)
    assert Tokenizer.load(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"model": {"type": "Unheard"}}'),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "\x00"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named_in_one_line(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=re.escape(name)) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_wrong_end_of_sequence_id_is_refused(folder):
    write(folder / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(TokenizerError, match="eos_token_id is '</s>'"):
        Tokenizer.load(folder)


@pytest.mark.pod
def test_a_draft_model_needs_the_vocabulary_of_the_served_one(folder, tmp_path):
    served = Tokenizer.load(folder)
    check_draft(served, folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    file = json.loads((other / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(
        TokenizerError, match=r"--draft-model is .*other: its token [0-9]+ is "
    ) as no:
        check_draft(served, other)
    assert repr(one) in str(no.value)
    assert repr(two) in str(no.value)
    with pytest.raises(TokenizerError, match=r"--draft-model is .*nothing: "):
        check_draft(served, tmp_path / "nothing")
    for number, config in enumerate(({"draft_vocab_size": 9}, {"medusa_num_heads": 3})):
        heads = tmp_path / f"heads{number}"
        heads.mkdir()
        (heads / "config.json").write_text(json.dumps(config))
        check_draft(served, heads)
    check_draft(served, Path(MTP))


@pytest.mark.pod
def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model, "):
        Tokenizer.load(tmp_path)


@pytest.mark.pod
def test_neither_torch_nor_transformers_is_imported(folder):
    program = (
        "import sys; from pathlib import Path;"
        "from tokenpod.service.text.tokenizers.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(folder)!r})).encode('fox');"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"


# --- SentencePiece models without tokenizer.json


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Llama 2 came: a SentencePiece BPE model with byte fallback, no tokenizer.json."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = ["the quick brown fox jumps over the lazy dog", "again and again the fox", "naïve"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "legacy": True,
        },
    )
    write(folder / "config.json", {"model_type": "llama"})
    return folder


@pytest.mark.pod
def test_a_sentencepiece_model_is_converted_and_decodes_as_sentencepiece(sentencepiece_folder):
    import sentencepiece

    tokenizer = Tokenizer.load(sentencepiece_folder)
    model = sentencepiece.SentencePieceProcessor(str(sentencepiece_folder / "tokenizer.model"))
    assert tokenizer.vocab_size == model.get_piece_size()
    assert tokenizer.eos_token_ids == {model.eos_id()}
    text = "the fox 你好\n👍"
    assert tokenizer.encode(text) == [model.bos_id(), *model.encode(text)]
    rng = random.Random(3)
    ordinary = [i for i in range(model.get_piece_size()) if not model.is_byte(i) and i > 2]
    for _ in range(500):
        ids = rng.choices(ordinary, k=6) + model.encode(rng.choice(["好", "👍a", "\n"]))
        assert decoded(tokenizer, ids) == model.decode(ids)


@pytest.mark.pod
def test_a_broken_sentencepiece_model_is_named_in_one_line(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(TokenizerError, match=r"tokenizer\.model can't be converted") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


# --- chats


def test_a_chat_is_rendered_with_the_models_special_tokens(folder):
    tokenizer = Tokenizer.load(folder)
    messages = [("user", "fox?"), ("assistant", "<b>dog</b>")]
    expected = "<s><|user|>fox?</s><|user|><b>dog</b></s>"
    assert tokenizer.render_chat(turns(*messages)) == expected + "assistant:"
    assert tokenizer.render_chat(turns(*messages, add_generation_prompt=False)) == expected


def test_an_encoded_chat_has_the_special_tokens_of_the_template_only(folder):
    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.render_chat(turns(("user", "fox"), add_generation_prompt=False))
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert ids == [0, 2, *fox, 1]


def test_the_file_comes_before_the_configuration(folder):
    tokenizer = with_template(folder, "{{ messages[0].role }}")
    assert tokenizer.render_chat(turns(("system", "x"))) == "system"


def test_the_default_of_named_templates_is_used(folder):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).render_chat(turns()) == "yes"


def test_a_model_without_a_template_says_so(folder):
    write(folder / "tokenizer_config.json", {})
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(turns(("user", "x")))


def test_a_broken_template_fails_chats_and_nothing_else(folder):
    tokenizer = with_template(folder, "line\n{% for %}")
    assert tokenizer.encode("fox")
    with pytest.raises(ChatTemplateError, match="broken: line 2"):
        tokenizer.render_chat(turns(("user", "x")))


def test_the_templates_own_exception_reaches_the_client(folder):
    tokenizer = with_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.render_chat(turns(("user", "x")))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7]['content'] + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'secrets' %}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_chat_template_error(folder, template):
    tokenizer = with_template(folder, template)
    with pytest.raises(ChatTemplateError, match="the model's chat template"):
        tokenizer.render_chat(turns(("user", "x")))


def test_a_templates_loops_and_output_are_bounded(folder):
    half = MAX_RANGE_STEPS // 2 + 1
    loops = f"{{% for i in range(2) %}}{{% for j in range({half}) %}}{{% endfor %}}{{% endfor %}}"
    with pytest.raises(ChatTemplateError, match=f"more than {MAX_RANGE_STEPS} steps"):
        with_template(folder, loops).render_chat(turns())
    with pytest.raises(ChatTemplateError, match="more than"):
        with_template(folder, "{% for i in range(10**30) %}{% endfor %}").render_chat(turns())
    output = "{% for i in range(40) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=f"over {MAX_RENDERED_CHARS} characters"):
        with_template(folder, output).render_chat(turns(("user", "x" * (MAX_RENDERED_CHARS // 30))))


def test_what_templates_of_models_use_is_there(folder):
    template = """
    {%- set box = namespace(n=0) %}
    {%- for message in messages %}
        {%- if loop.first %}{% continue %}{% endif %}
        {%- set box.n = box.n + 1 %}
        {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {%- endfor %}
    {{- messages[0] | tojson }} {{ messages[0] | tojson(indent=1) | length }}
    {{- strftime_now('%Y') | length }} {{ tools is none }} {{ range(3) | list }} {{ box.n }}"""
    tokenizer = with_template(folder, template)
    content = "<é & 'x'>"
    message = {"role": "user", "content": content}
    assert tokenizer.render_chat(turns(("user", content), ("assistant", " ok "))) == (
        f"ok{json.dumps(message, ensure_ascii=False)} "
        f"{len(json.dumps(message, ensure_ascii=False, indent=1))}4 True [0, 1, 2] 1"
    )


def test_a_chat_is_what_transformers_makes_of_it(folder):
    from transformers import PreTrainedTokenizerFast

    template = """{% for message in messages %}
    {% if message.role == 'user' %}
<|user|> {{ message.content | tojson }}
    {% else %}
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}

    {% endif %}
{% endfor %}
{{ bos_token }}{{ add_generation_prompt }}
"""
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    ours = with_template(folder, template)
    pairs = [("user", "<a> é"), ("assistant", "b\n"), ("user", "")]
    messages = [{"role": role, "content": content} for role, content in pairs]
    arguments = {"chat_template": template, "add_generation_prompt": True}
    rendered = theirs.apply_chat_template(messages, tokenize=False, **arguments)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert ours.render_chat(turns(*pairs)) == rendered
    assert ours.encode(ours.render_chat(turns(*pairs)), add_special_tokens=False) == ids


# --- roles


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (CHAT, []),
        ("{% if messages[0]['role'] == 'system' %}x{% endif %}", ["system"]),
        (
            "{% for m in messages %}{% if m.role in ['user', 'tool'] and m['content'] == 'x' %}"
            "{% elif 'assistant' == m['role'] %}{% endif %}{% endfor %}",
            ["assistant", "tool", "user"],
        ),
        ("{% if broken", []),
        ("{{ " + "(" * 5000 + " }}", []),
    ],
)
def test_a_templates_roles_are_those_that_it_compares_with(template: str, roles: list[str]) -> None:
    assert roles_of(template) == roles
