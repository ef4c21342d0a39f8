"""The engine against a slow reference: one sequence, the whole history through the model for each token, no cache."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from gymtune.agents import GenerateRequest, Generation, Sampling
from gymtune.agents.models import CausalAttend, Decoder, load_model
from gymtune.agents.sampler import sample
from gymtune.agents.torch_engine import TorchEngine
from gymtune.tools.errors import ConfigError, RunError

LOGPROB_TOLERANCE = 1e-5  # fp32, other orders of summation
GREEDY = Sampling(temperature=0, max_new_tokens=12)
RANDOM = Sampling(temperature=0.8, max_new_tokens=12)


@pytest.fixture
def model(tiny_model) -> Decoder:
    """A decoder whose every part matters: weights large enough for peaked distributions."""
    model = load_model(tiny_model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3, generator=generator)
    return model


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]


def request(prompt: Sequence[int], sampling: Sampling = GREEDY, *, session: str = "s", seed: int = 1, stop=()):
    return GenerateRequest(prompt, sampling, tuple(stop), seed, session)


@torch.no_grad()
def reference(model: Decoder, wanted: GenerateRequest) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < wanted.sampling.max_new_tokens and not set(ids[-1:]) & set(wanted.stop_ids):
        tokens = torch.tensor([[*wanted.prompt_ids, *ids]])
        hidden = model(tokens, torch.arange(tokens.shape[1])[None], CausalAttend())
        (token,), (logprob,) = sample(model.logits(hidden[:, -1]), [wanted.sampling], [wanted.seed], [len(ids)])
        ids.append(token)
        logprobs.append(logprob)
    return ids, logprobs


def generate(engine: TorchEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return asyncio.run(all_of_them())


def assert_equal(model: Decoder, requests: Sequence[GenerateRequest], generations: Sequence[Generation]) -> None:
    for wanted, generation in zip(requests, generations, strict=True):
        ids, logprobs = reference(model, wanted)
        assert generation.ids == ids
        assert generation.logprobs == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)


def count_forward(model: Decoder) -> list[int]:
    """Collect the number of ids of each forward pass from now on, padding included."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    return seen


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_sequences_of_many_lengths_equal_the_reference(model, sampling):
    requests = [request(p, sampling, session=str(i), seed=i * 31 + 1) for i, p in enumerate(prompts(9))]
    assert_equal(model, requests, generate(TorchEngine(model), requests))


def test_the_reference_can_tell(model):
    """The model is loud enough: one changed token of the prompt changes what is sampled."""
    prompt = prompts(9)[0]
    assert reference(model, request(prompt)) != reference(model, request([(prompt[0] + 1) % 300, *prompt[1:]]))


def test_joins_and_leaves_change_nothing(model):
    """Sequences that come while others run and end at other times; with fewer slots than sequences they wait."""
    lengths = [3, 12, 1, 7, 9, 2, 12, 5]
    requests = [
        request(p, RANDOM.model_copy(update={"max_new_tokens": n}), session=str(i), seed=i + 1)
        for i, (p, n) in enumerate(zip(prompts(8), lengths, strict=True))
    ]
    for slots in (2, 3, 64):
        engine = TorchEngine(model, max_sequences=slots)

        async def late(number: int, engine: TorchEngine = engine) -> Generation:
            for _ in range(2 * number):
                await asyncio.sleep(0)
            return await engine.generate(requests[number])

        async def all_of_them(late=late) -> list[Generation]:
            return await asyncio.gather(*(late(number) for number in range(8)))

        assert_equal(model, requests, asyncio.run(all_of_them()))


def test_twins_share_one_prefill_and_keep_their_own_randomness(model):
    prompt = prompts(1, seed=4)[0] + [7] * 20
    requests = [request(prompt, RANDOM, session=str(i), seed=i + 1) for i in range(4)]
    requests.insert(2, request([5, 6, 7], RANDOM, session="other", seed=9))
    seen = count_forward(model)
    generations = generate(TorchEngine(model), requests)
    assert seen[:2] == [len(prompt), 3]  # the prompt once, and the other, much shorter, apart: no padding
    assert len({tuple(g.ids) for g in generations}) > 1
    assert_equal(model, requests, generations)


def test_a_second_turn_computes_only_what_is_new(model):
    engine, prompt = TorchEngine(model), prompts(1, seed=3)[0] + [9] * 30
    (first,) = generate(engine, [request(prompt)])
    seen = count_forward(model)
    more = request([*prompt, *first.ids, 11, 12, 13], RANDOM)
    second = generate(engine, [more])
    assert seen[0] == 4  # the last sampled token, whose keys and values nobody needed before, and the three new ones
    assert_equal(model, [more], second)


def test_a_rewritten_history_keeps_what_it_shares(model):
    engine, prompt = TorchEngine(model), [3, 1, 4, 1, 5, 9, 2, 6]
    generate(engine, [request(prompt)])
    seen = count_forward(model)
    rewritten = request([3, 1, 4, 7, 7, 7, 7, 7, 7, 7], RANDOM)
    assert_equal(model, [rewritten], generate(engine, [rewritten]))
    assert seen[0] == 7
    shorter = request([3, 1], RANDOM)
    assert_equal(model, [shorter], generate(engine, [shorter]))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_evicted_sessions_come_back_with_the_same_tokens(model, slots):
    engine = TorchEngine(model, max_sequences=slots)
    histories = prompts(5, seed=8)
    for turn in range(3):
        requests = [request(h, RANDOM, session=str(i), seed=i + 10 * turn) for i, h in enumerate(histories)]
        generations = generate(engine, requests)
        assert_equal(model, requests, generations)
        histories = [[*h, *g.ids, 20 + turn] for h, g in zip(histories, generations, strict=True)]


def test_two_requests_of_one_session_follow_each_other(model):
    requests = [request([1, 2, 3], RANDOM, seed=1), request([1, 2, 3, 4], RANDOM, seed=2)]
    assert_equal(model, requests, generate(TorchEngine(model), requests))


def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_alone(model):
    engine = TorchEngine(model, max_sequences=2)
    kept = request(prompts(1)[0], RANDOM, session="kept")
    gone = request([5] * 30, Sampling(max_new_tokens=400), session="gone")
    later = request([6] * 9, RANDOM, session="later")

    async def run() -> list[Generation]:
        cancelled = asyncio.create_task(engine.generate(gone))
        others = [asyncio.create_task(engine.generate(one)) for one in (kept, later)]  # `later` waits for a slot
        for _ in range(6):
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        engine.release("gone")
        return await asyncio.wait_for(asyncio.gather(*others), 20)

    assert_equal(model, [kept, later], asyncio.run(run()))
    # The same session again, after its request was cut in the middle.
    again = request([5] * 12, RANDOM, session="gone")
    assert_equal(model, [again], generate(engine, [again]))
    engine.load_weights(1, dict(model.named_parameters()))  # nothing is being sampled any more


def test_a_slot_cut_in_the_middle_is_not_taken_for_what_it_held_before(model):
    """Slot of `a` -> evicted by `b`, whose turn is cancelled -> `b` again, with the words of `a`."""
    engine, words = TorchEngine(model, max_sequences=1), [3, 1, 4, 1, 5, 9]
    generate(engine, [request(words, session="a")])

    async def cut() -> None:
        task = asyncio.create_task(engine.generate(request([8] * 6, Sampling(max_new_tokens=99), session="b")))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut())
    again = request([*words, 2], RANDOM, session="b")
    assert_equal(model, [again], generate(engine, [again]))


def test_new_weights_count_at_once_and_forget_the_cache(model):
    engine = TorchEngine(model, version=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    (before,) = generate(engine, [request(prompt)])
    weights = {name: weight.detach() * 1.1 for name, weight in model.named_parameters()}
    engine.load_weights(5, weights)
    seen = count_forward(model)
    more = request([*prompt, *before.ids])
    (after,) = generate(engine, [more])
    assert (before.policy_version, after.policy_version) == (4, 5)
    assert seen[0] == len(more.prompt_ids)
    assert_equal(model, [more], [after])
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


def test_weights_that_do_not_fit_change_nothing(model):
    engine = TorchEngine(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights = {name: weight + 1 for name, weight in before.items()}
    last = list(weights)[-1]
    with pytest.raises(RunError, match="names differ"):
        engine.load_weights(1, {name: weights[name] for name in list(weights)[1:]})
    with pytest.raises(RunError, match=last):
        engine.load_weights(1, weights | {last: torch.ones(1)})  # copying would broadcast it without a word
    assert engine.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_weights_are_refused_while_sequences_are_sampled(model):
    engine = TorchEngine(model)

    async def run() -> None:
        task = asyncio.create_task(engine.generate(request([1, 2, 3])))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="1 sequences are being sampled"):
            engine.load_weights(1, dict(model.named_parameters()))
        await task

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "got 0"),
        ([1] * 64, "1 to 63 tokens .* got 64"),
        ([1, 999_999], "999999 is outside"),
        ([1, -5, 3], "-5 is outside"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_from_is_refused_and_harms_nobody(model, prompt, told):
    engine = TorchEngine(model, max_model_length=64)
    good = request([1, 2, 3], RANDOM, session="good")

    async def run() -> Generation:
        task = asyncio.create_task(engine.generate(good))
        with pytest.raises(ConfigError, match=told):
            await engine.generate(request(prompt))
        return await task

    assert_equal(model, [good], [asyncio.run(run())])


def test_how_a_turn_ends(model):
    prompt = [1, 2, 3]
    ids, _ = reference(model, request(prompt))
    engine = TorchEngine(model, max_model_length=8)
    one = GREEDY.model_copy(update={"max_new_tokens": 1})
    turns = [
        request(prompt, one, session="one"),
        request(prompt, session="stop at first", stop=ids[:1]),
        request(prompt, one, session="stop at last", stop=ids[:1]),
        request(prompt, session="full"),
        request([1] * 7, session="one place left"),
    ]
    endings = [(g.finish_reason, len(g.ids)) for g in generate(engine, turns)]
    # Positions of 8: 3 of the prompt and 5 sampled; the last sampled one is never fed.
    assert endings == [("length", 1), ("stop", 1), ("stop", 1), ("length", 5), ("length", 1)]


def test_a_failure_inside_is_told_to_all_who_wait_and_the_engine_goes_on(model, monkeypatch):
    engine = TorchEngine(model, max_sequences=2)
    requests = [request([1, 2, 3], RANDOM, session=str(i), seed=i) for i in range(3)]

    def breaks(*_):
        raise FloatingPointError("hot")

    async def run() -> list[object]:
        return await asyncio.gather(*(engine.generate(one) for one in requests), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", breaks)
        errors = asyncio.run(run())
    assert [type(error) for error in errors] == [RunError] * 3
    assert "hot" in str(errors[0])
    assert_equal(model, requests, generate(engine, requests))


def test_the_same_requests_give_the_same_bits(model):
    requests = [request(p, RANDOM, session=str(i), seed=i) for i, p in enumerate(prompts(12))]
    first, second = (generate(TorchEngine(model, max_sequences=5), requests) for _ in range(2))
    assert first == second
