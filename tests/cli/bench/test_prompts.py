"""What is asked: reproducible, independent of who sends it, never repeated by accident."""

from __future__ import annotations

import pytest

from tokenpod_client.cli.bench.files import read_texts
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.messages import Plan
from tokenpod_client.cli.bench.prompts import Prompts, Text, Uniform
from tokenpod_client.cli.bench.worker import make_request

ONE = Uniform(1, 1)
DRAWN = Prompts(Uniform(5, 9), Uniform(2, 4), (100, 110))


def ask(prompts, seed, level, index):
    return make_request(Plan([], BenchOptions(), prompts, seed, True, [], {}), level, index)


def test_a_request_is_a_function_of_seed_level_and_number():
    assert ask(DRAWN, 1, 1, 7) == ask(DRAWN, 1, 1, 7)
    prompts = [
        ask(DRAWN, *key).token_ids.ids for key in ((1, 1, 7), (1, 1, 8), (1, 2, 7), (2, 1, 7))
    ]
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_drawn_lengths_and_ids_are_within_their_ranges():
    asked = [ask(DRAWN, 0, 1, i) for i in range(300)]
    assert {len(a.token_ids.ids) for a in asked} == {5, 6, 7, 8, 9}
    assert {a.stopping.max_new_tokens for a in asked} == {2, 3, 4}
    assert {token for a in asked for token in a.token_ids.ids} == set(range(100, 110))


def test_listed_lengths_come_in_order_and_begin_again_with_other_tokens():
    prompts = Prompts(ONE, ONE, (0, 1000), pairs=((30, 1), (40, 2)))
    asked = [ask(prompts, 0, 1, i) for i in range(4)]
    assert [(len(a.token_ids.ids), a.stopping.max_new_tokens) for a in asked] == [
        (30, 1),
        (40, 2),
    ] * 2
    assert asked[0].token_ids != asked[2].token_ids


def test_requests_of_a_group_share_their_prefix_and_nothing_more():
    prompts = Prompts(Uniform(20, 20), ONE, (0, 1000), prefix_tokens=16, prefix_groups=3)
    asked = [ask(prompts, 0, 1, i) for i in range(60)]
    assert {len(a.token_ids.ids) for a in asked} == {36}
    assert len({tuple(a.token_ids.ids[:16]) for a in asked}) == 3
    assert len({tuple(a.token_ids.ids[16:]) for a in asked}) == 60


def test_levels_share_no_prefix():
    prompts = Prompts(ONE, ONE, (0, 1000), prefix_tokens=16)
    assert ask(prompts, 0, 1, 0).token_ids.ids[:16] != ask(prompts, 0, 2, 0).token_ids.ids[:16]


def test_texts_come_in_order_and_their_own_length_wins():
    prompts = Prompts(ONE, Uniform(9, 9), texts=(Text("a"), Text("b", max_new_tokens=3)))
    asked = [ask(prompts, 0, 1, i) for i in range(3)]
    assert [(a.text, a.stopping.max_new_tokens) for a in asked] == [("a", 9), ("b", 3), ("a", 9)]


def test_a_text_file_has_a_prompt_a_line():
    assert read_texts("one\n\n  two \n", json_lines=False) == (Text("one"), Text("  two "))


def test_a_json_lines_file_has_prompts_and_chats():
    content = """{"prompt": "one", "max_new_tokens": 5, "id": 3}
{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
"""
    assert read_texts(content, json_lines=True) == (
        Text("one", max_new_tokens=5),
        Text(messages=[("system", "be brief"), ("user", "hi")]),
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (" \n", "has no prompts"),
        ('{"prompt": "x"}\n{', "line 2 is not JSON"),
        ("[1]", "line 1 has neither a prompt nor messages"),
        ('{"messages": []}', "line 1 has neither"),
        ('{"messages": [{"role": "user"}]}', "line 1 has neither"),
        ('{"prompt": "x", "max_new_tokens": 0}', "line 1: max_new_tokens is 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(content, problem):
    with pytest.raises(ValueError, match=problem):
        read_texts(content, json_lines=True)
