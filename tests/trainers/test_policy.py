"""The one forward pass of every loss against a slow one: a row at a time, a prefix at a time, all logits."""

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.agents.models import CausalAttend
from gymtune.trainers import batch as batch_module
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs

FP64 = 1e-10  # two float64 ways to the same number
CPU = torch.device("cpu")


def slow(model, rows):
    """Return log-probs and entropies: for each trainable token one forward over what stands before it, and no more."""
    logprobs, entropies = [], []
    for row in rows:
        for place in row.places:
            ids = torch.tensor([row.tokens[:place]])
            hidden = model(ids, torch.arange(place)[None], CausalAttend())
            whole = (model.logits(hidden[0, -1]) / row.temperature).log_softmax(-1)
            logprobs.append(whole[row.tokens[place]])
            entropies.append(-(whole.exp() * whole).sum())
    return torch.stack(logprobs), torch.stack(entropies).detach()


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def close(left, right):
    return all(torch.allclose(a, b, rtol=0, atol=FP64) for a, b in zip(left, right, strict=True))


@pytest.fixture
def rows(episode):
    """Of one length order: a group that shares a prompt, two turns, a lone token; id 0 is pad and eos alike."""
    cold = Sampling(temperature=0.75)  # a number that float32 holds exactly
    trajectories = [
        episode((0, [3, 4, 5, 6]), (1, [7, 8, 0]), (0, [9, 2]), (1, [1, 0])),
        episode((0, [3, 4, 5, 6]), (1, [7, 1, 2, 0]), sampling=cold),
        episode((0, [3, 4, 5, 6]), (1, [2, 0])),
        episode((0, [3, 4, 5]), (1, [0])),
    ]
    return make_rows(experiences_of(trajectories, [1.0] * 4, need_logprobs=True))


@pytest.mark.parametrize("fork", [1, 16])
@pytest.mark.parametrize("limit", [1, 12, 1000])
def test_equals_the_slow_way_in_value_and_gradient(decoder, rows, limit, fork, monkeypatch):
    monkeypatch.setattr(batch_module, "WORTH_A_FORK", fork)
    model = decoder()
    batches = micro_batches(rows, limit, CPU)
    computed = sum(batch.ids.numel() for batch in batches)
    if limit == 1 or fork == 16:
        assert computed == sum(row.places[-1] for row in rows)  # every row whole, up to what predicts its last token
    else:
        assert computed < sum(row.places[-1] for row in rows)
    parts = [policy_logprobs(model, batch) for batch in batches]
    fast, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    wanted, wanted_entropy = slow(model, [rows[i] for batch in batches for i in batch.trajectory.unique_consecutive()])
    assert torch.allclose(fast, wanted, rtol=0, atol=FP64)
    assert torch.allclose(entropy, wanted_entropy, rtol=0, atol=FP64)
    weights = torch.linspace(-1, 2, len(fast), dtype=torch.float64)
    assert close(gradients(model, fast @ weights), gradients(model, wanted @ weights))


def test_an_entropy_bonus_reaches_the_weights(decoder, rows):
    model = decoder()
    (batch,) = micro_batches(rows, 1000, CPU)
    _, entropy = policy_logprobs(model, batch, entropy_grad=True)
    step = 1e-6
    grads = gradients(model, entropy.sum())
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.add_(grad, alpha=step)
        raised = policy_logprobs(model, batch)[1]
    expected = step * sum(float(g.square().sum()) for g in grads)
    assert (raised.sum() - entropy.sum()).item() == pytest.approx(expected, rel=1e-3)


def test_what_stands_after_the_last_trainable_token_changes_nothing(decoder, episode):
    model = decoder()

    def logprobs(tail):
        made = make_rows(experiences_of([episode((0, [3, 4]), (1, [5, 6]), (0, tail))], [1.0], need_logprobs=True))
        return policy_logprobs(model, micro_batches(made, 1000, CPU)[0])[0]

    plain, noisy = logprobs([7, 8, 9]), logprobs([20, 21, 22])
    assert torch.equal(plain, noisy)
    assert close(gradients(model, plain.sum()), gradients(model, noisy.sum()))


def test_what_stands_before_it_does(decoder, episode):
    """The test above can fail: masked tokens between two turns are context."""
    model = decoder()
    first, second = (
        policy_logprobs(
            model,
            micro_batches(
                make_rows(
                    experiences_of([episode((0, [3]), (1, [5]), (0, [said]), (1, [6]))], [1.0], need_logprobs=True)
                ),
                100,
                CPU,
            )[0],
        )[0]
        for said in (7, 8)
    )
    assert first[0] == second[0]
    assert abs(first[1] - second[1]).item() > 1e-3


def test_rows_are_permuted_with_their_numbers(decoder, rows):
    model = decoder()
    order = [2, 0, 3, 1]
    plain = [policy_logprobs(model, micro_batches([row], 1000, CPU)[0])[0] for row in rows]
    (batch,) = micro_batches([rows[i] for i in order], 1000, CPU)
    together, _ = policy_logprobs(model, batch)
    for index, row in enumerate(rows):
        assert torch.allclose(together[batch.trajectory == row.trajectory], plain[index], rtol=0, atol=FP64)


def test_bfloat16_weights_give_float32_log_probs(decoder, rows):
    (batch,) = micro_batches(rows, 1000, CPU)
    logprobs, entropy = policy_logprobs(decoder(dtype=torch.bfloat16), batch)
    assert logprobs.dtype == entropy.dtype == torch.float32
