"""Sampling: log-probs of the sampled distribution (L9), filters, and one draw per row."""

import math
import random

import pytest
import torch

from rollart.backends.torch.sampling import Rows, sample
from rollart.core.types import Sampling


def draw(logits, samplings, uniforms):
    logits = torch.tensor(logits)
    return sample(logits, Rows.of(samplings, logits.shape[-1]), torch.tensor(uniforms))


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [-.4076, -1.4076, -2.4076]),
                                                       (0.6, [-.2026, -1.8692, -3.5359])])
def test_logprobs_are_those_of_the_tempered_distribution(temperature, expected):
    edges = torch.tensor(expected).exp().cumsum(0).tolist()
    uniforms = [edges[0] / 2, (edges[0] + edges[1]) / 2, (edges[1] + 1) / 2]
    tokens, logprobs = draw([[2., 1., 0.]] * 3, [Sampling(temperature)] * 3, uniforms)
    assert tokens.tolist() == [0, 1, 2]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_greedy_row_takes_the_likeliest_with_the_logprob_of_temperature_one():
    tokens, logprobs = draw([[2., 1., 0.]] * 2, [Sampling(0.0, top_p=.1, top_k=1), Sampling(0.6)], [.99, .5])
    assert tokens.tolist() == [0, 0]
    assert logprobs.tolist() == pytest.approx([-.4076, -.2026], abs=1e-4)


def test_top_k_and_top_p_renormalise_over_what_they_keep():
    logits = torch.tensor([.5, .3, .15, .05]).log().tolist()
    for sampling, kept in ((Sampling(top_k=2), [.5, .3]), (Sampling(top_p=.7), [.5, .3]), (Sampling(top_p=.4), [.5]),
                           (Sampling(top_p=.81), [.5, .3, .15]), (Sampling(top_k=3, top_p=.8), [.5, .3])):
        uniforms = [(i + .5) / 50 for i in range(50)]
        tokens, logprobs = draw([logits] * 50, [sampling] * 50, uniforms)
        assert set(tokens.tolist()) == set(range(len(kept)))
        expected = (torch.tensor(kept) / sum(kept)).log()
        assert torch.allclose(logprobs, expected[tokens], atol=1e-5)


def test_a_row_draws_the_same_whatever_its_neighbours_ask_for():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator).tolist()
    kinds = [Sampling(), Sampling(.6), Sampling(1.0, top_p=.8), Sampling(.9, top_k=5)] * 2
    stream = random.Random(0)
    uniforms = [stream.random() for _ in range(8)]
    tokens, logprobs = draw(logits, kinds, uniforms)
    for i in range(8):
        alone = draw([logits[i]], [kinds[i]], [uniforms[i]])
        assert (int(alone[0]), pytest.approx(float(alone[1]), abs=1e-6)) == (int(tokens[i]), float(logprobs[i]))


def test_frequencies_follow_the_probabilities():
    p = torch.tensor([.5, .3, .15, .05])
    n = 20_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(1)).tolist()
    tokens, _ = draw([p.log().tolist()] * n, [Sampling()] * n, uniforms)
    assert torch.allclose(torch.bincount(tokens, minlength=4) / n, p, atol=.01)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2 ** -53, 1.0])
def test_no_draw_finds_a_token_without_probability(uniform):
    rows = [[-torch.inf, 0.0, 0.0, -torch.inf], [0.0, -200.0, -200.0, -200.0]]
    tokens, logprobs = draw(rows, [Sampling()] * 2, [uniform] * 2)
    assert tokens[0] in (1, 2)
    assert tokens[1] == 0
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [math.inf, -math.inf]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(0.5, top_p=0.9)])
def test_logits_that_are_no_distribution_are_refused_and_no_token_is_made_up(row, sampling):
    with pytest.raises(FloatingPointError, match="logits that are not finite"):
        draw([[0.0, 1.0], row], [sampling] * 2, [0.5, 0.5])
