"""Traces in three formats, told apart by the names of their columns."""

import pytest

from tokenpod.simulator.trace import Arrival, TraceError, at_rate, read_trace

OURS = """arrival_s,prompt_tokens,output_tokens,max_new_tokens,priority,prefix_id,prefix_tokens
12.5,100,7,20,1,3,40
10,50,9,,,,
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:17:05.0000000,110,0
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


@pytest.fixture
def read(tmp_path):
    def of(text):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return read_trace(path)

    return of


def test_ours_is_read_in_the_order_of_arrival(read):
    assert read(OURS).arrivals == [
        Arrival(0.0, 50, 9),
        Arrival(2.5, 100, 7, max_new_tokens=20, priority=1, prefix_id=3, prefix_tokens=40),
    ]


def test_azures_has_dates_and_seven_digits_of_a_second(read):
    trace = read(AZURE)
    first, second = trace.arrivals
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.052)
    assert second.max_new_tokens is None
    assert trace.left_out == 1


def test_bursts_failures_are_left_out_and_counted(read):
    trace = read(BURST)
    assert trace.arrivals == [Arrival(0.0, 472, 18), Arrival(113.0, 417, 276)]
    assert trace.left_out == 1


def test_a_trace_can_come_faster(read):
    assert [each.at for each in at_rate(read(OURS).arrivals, 5)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has columns without names; it must have arrival_s,prompt_tokens"),
        ("a,b\n1,2\n", "has columns a, b; it must have"),
        (OURS.splitlines()[0] + "\n", "has no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n1,x,2\n", "line 2: prompt_tokens is 'x'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,0,2\n", "line 2: prompt_tokens is 0: it must"),
        ("arrival_s,prompt_tokens,output_tokens\n1,4\n", "line 2: output_tokens is ''"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,4,4\n", "line 2: arrival_s is nan"),
        ("arrival_s,prompt_tokens,output_tokens\n1,1e400,4\n", "line 2: prompt_tokens is '1e400'"),
        (OURS + "1,30,1,,,1,31\n", "prefix_tokens is 31: it must be at most prompt_tokens, 30"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: "),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(read, text, problem):
    with pytest.raises(TraceError) as caught:
        read(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"arrival_s,\xff\xfe\x00")
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(path)
