from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted_engine import BOS, MODEL

from kvq_cli.engine.params import SamplingParams


def said(prompt_tokens, words=5):
    return "".join(f"{prompt_tokens}:{n} " for n in range(words))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("abc", [[BOS, 97, 98, 99]]),
        (["abc", "d"], [[BOS, 97, 98, 99], [BOS, 100]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_each_prompt_is_one_choice(client, engine, prompt, tokens):
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert [handle.prompt for handle in engine.submitted] == tokens
    assert [c.index for c in answer.choices] == list(range(len(tokens)))
    assert [c.text for c in answer.choices] == [said(len(t)) for t in tokens]
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert answer.usage.completion_tokens == 5 * len(tokens)


def test_choices_are_numbered_prompt_by_prompt(client, engine):
    answer = client.completions.create(model=MODEL, prompt=["a", "bcd"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [said(2)] * 2 + [said(4)] * 2
    assert answer.usage.prompt_tokens == 2 + 4


def test_the_default_length_is_openais(client, engine):
    client.completions.create(model=MODEL, prompt="a")
    client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    assert [handle.params for handle in engine.submitted] == [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=3),
    ]


def test_choices_of_one_stream_come_side_by_side(client, engine):
    engine.pause = 0.005
    stream = client.completions.create(
        model=MODEL,
        prompt=["a", "bcd"],
        stream=True,
        max_tokens=4,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts, reasons = ["", ""], [[], []]
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index].append(choice.finish_reason)
    assert texts == [said(2, 4), said(4, 4)]
    assert reasons == [[None] * 3 + ["length"]] * 2
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 8)


def test_sixteen_clients_at_once(client, engine):
    engine.pause = 0.02

    def ask(n):
        return client.completions.create(model=MODEL, prompt=[97] * n, max_tokens=5)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(1, 17)))
    assert [a.choices[0].text for a in answers] == [said(n) for n in range(1, 17)]
