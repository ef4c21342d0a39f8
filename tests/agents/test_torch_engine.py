"""The engine against a slow reference: one sequence, the whole history through the model for each token, no cache."""

import asyncio
import shutil
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
    """Collect the number of ids of each forward pass of the model itself (unpacked) from now on, padding included."""
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
    generations = generate(TorchEngine(model, layers="plain"), requests)
    # The prompt once and the other, without padding; then the last token of each copy, beside two that decode.
    assert seen[:2] == [len(prompt) + 3, 3 + 2]
    assert len({tuple(g.ids) for g in generations}) > 1
    assert_equal(model, requests, generations)


def test_a_second_turn_computes_only_what_is_new(model):
    engine, prompt = TorchEngine(model, layers="plain"), prompts(1, seed=3)[0] + [9] * 30
    (first,) = generate(engine, [request(prompt)])
    seen = count_forward(model)
    more = request([*prompt, *first.ids, 11, 12, 13], RANDOM)
    second = generate(engine, [more])
    assert seen[0] == 4  # the last sampled token, whose keys and values nobody needed before, and the three new ones
    assert_equal(model, [more], second)


def test_a_rewritten_history_keeps_what_it_shares(model):
    engine, prompt = TorchEngine(model, layers="plain"), [3, 1, 4, 1, 5, 9, 2, 6]
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
    engine = TorchEngine(model, layers="plain", version=4)
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


@pytest.mark.parametrize("layers", ["packed", "plain"])
def test_a_model_that_is_trained_in_place_samples_with_its_new_weights(model, layers):
    """As a trainer does it: the engine samples with the very parameters that an optimizer changes."""
    engine, wanted = TorchEngine(model, layers=layers), request([1, 2, 3, 4], RANDOM)
    generate(engine, [wanted])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    engine.load_weights(1, dict(model.named_parameters()))
    assert_equal(model, [wanted], generate(engine, [wanted]))


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
    engine = TorchEngine(model, layers="plain", max_sequences=2)
    requests = [request([1, 2, 3], RANDOM, session=str(i), seed=i) for i in range(3)]

    def breaks(*_):
        raise FloatingPointError("hot")

    async def run() -> list[object]:
        return await asyncio.gather(*(engine.generate(one) for one in requests), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", breaks)
        errors = asyncio.run(run())
    assert [type(error) for error in errors] == [RunError] * 3
    assert "hot" in str(errors[0])
    assert_equal(model, requests, generate(engine, requests))


def test_the_same_requests_give_the_same_bits(model):
    requests = [request(p, RANDOM, session=str(i), seed=i) for i, p in enumerate(prompts(12))]
    first, second = (generate(TorchEngine(model, max_sequences=5), requests) for _ in range(2))
    assert first == second


def watch_memory(model: Decoder, engine: TorchEngine) -> list[int]:
    """Collect what the cache has allocated at each forward pass from now on, in tokens and as told by its tensors."""
    seen: list[int] = []

    def note(*_: object) -> None:
        shelves = engine.cache._shelves.values()
        real = sum(store.numel() * store.element_size() for shelf in shelves for store in shelf.stores)
        assert real == engine.cache.allocated * engine.cache.bytes_per_token
        seen.append(engine.cache.allocated)

    model.register_forward_pre_hook(note)
    return seen


def play(engine: TorchEngine, histories: list[list[int]], turns: int, sampling: Sampling = RANDOM):
    """Sample some turns of several sessions at once; return every request with its generation."""
    told: list[tuple[GenerateRequest, Generation]] = []
    for turn in range(turns):
        requests = [request(h, sampling, session=str(i), seed=i + 10 * turn) for i, h in enumerate(histories)]
        generations = generate(engine, requests)
        told += zip(requests, generations, strict=True)
        histories = [[*h, *g.ids, 20 + turn] for h, g in zip(histories, generations, strict=True)]
    return told


@pytest.mark.parametrize("bound", [130, 333, 2000])
def test_a_bound_on_the_cache_holds_and_changes_nothing(model, bound):
    """Sequences wait, are evicted between turns and give way in the middle of one: each is sampled all the same."""
    long = RANDOM.model_copy(update={"max_new_tokens": 25})
    engine = TorchEngine(model, layers="plain", max_cache_tokens=bound)
    given_way = watch_given_way(engine)
    allocated = watch_memory(model, engine)
    told = play(engine, prompts(6, seed=8), 2, long)
    assert_equal(model, *zip(*told, strict=True))
    assert max(allocated) <= bound
    assert bool(given_way) == (bound < 2000)
    assert bound < 200 or "0" not in given_way  # the oldest goes on, unless its own row is in its way
    for session in range(6):
        engine.release(str(session))
    assert engine.cache.allocated == 0


def watch_given_way(engine: TorchEngine) -> list[str]:
    """Collect the session of each sequence that has sampled something and is admitted again."""
    seen, acquire = list[str](), engine.cache.acquire

    def watching(session: str, tokens: list[int]):
        nonlocal seen
        slot = acquire(session, tokens)
        waiting = next(s for s in engine._waiting if s.tokens is tokens)
        seen += [session] * (slot is not None and len(waiting.logprobs) > 0)
        # Who gave way is the first to come back.
        assert slot is None or waiting.logprobs or not any(s.logprobs for s in engine._waiting)
        return slot

    engine.cache.acquire = watching
    return seen


def test_without_a_bound_memory_follows_what_is_held(model):
    """One long sequence does not make all rows long."""
    engine = TorchEngine(model, layers="plain")
    requests = [request([5] * 400, session="long"), *(request([i] * 10, session=str(i)) for i in range(15))]
    allocated = watch_memory(model, engine)
    assert_equal(model, requests, generate(engine, requests))
    assert max(allocated) <= 512 + 32 * 22  # 15 rows of 32, allocated by halves more


def test_a_prompt_that_the_cache_can_never_hold_is_refused_by_name(model):
    engine = TorchEngine(model, max_cache_tokens=100)
    assert engine.max_model_length == 100
    with pytest.raises(ConfigError, match=r"1 to 99 tokens .*max_cache_tokens 100: raise it.* got 100"):
        generate(engine, [request([1] * 100)])
    (full,) = generate(engine, [request([1] * 90, Sampling(max_new_tokens=50))])
    assert (full.finish_reason, len(full.ids)) == ("length", 10)
    with pytest.raises(ConfigError, match=r"max_cache_tokens must be at least 2 .* got 1"):
        TorchEngine(model, max_cache_tokens=1)


def test_what_prompts_share_is_computed_once(model):
    """Unlike prompts that begin alike (tool schemas): the first is computed whole, the others where they differ."""
    shared, own = [7, 3] * 50, [[1, 2], [3, 4, 5], [6] * 150]
    requests = [request([*shared, *p], session=str(i), seed=i) for i, p in enumerate(own)]
    seen = count_forward(model)
    assert_equal(model, requests, generate(TorchEngine(model, layers="plain"), requests))
    assert seen[:2] == [102, 1 + 3 + 150]


def test_in_deterministic_mode_company_and_memory_change_no_bit(model):
    histories = prompts(8, seed=5)
    histories[3] = [*histories[2], 9, 9]  # they share a prefix: copied when both are there, computed when alone
    histories[5] = [11] * 120
    long = RANDOM.model_copy(update={"max_new_tokens": 24})

    def run(**options) -> list[Generation]:
        return [g for _, g in play(TorchEngine(model, layers="deterministic", **options), histories, 2, long)]

    together = run()
    assert run(max_sequences=1) == together
    pressed = TorchEngine(model, layers="deterministic", max_cache_tokens=420)
    given_way = watch_given_way(pressed)
    told = play(pressed, histories, 2, long)
    assert [g for _, g in told] == together
    assert given_way
    assert_equal(model, *zip(*told, strict=True))


def test_in_deterministic_mode_every_pass_has_one_shape(model):
    engine, seen = TorchEngine(model, layers="deterministic"), count_forward(model)
    generate(engine, [request(p, session=str(i)) for i, p in enumerate(prompts(40))])
    assert set(seen) in ({32}, {1})  # 1 where the products of this machine do not treat rows alike


def test_unknown_layers_are_refused_by_name(model):
    with pytest.raises(ConfigError, match="unknown layers 'fast': wanted one of packed, plain, compiled"):
        TorchEngine(model, layers="fast")


def test_stop_strings_end_a_turn_and_leave_its_ids_alone(model):
    def decode(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    prompt = prompts(1)[0]
    ids, _ = reference(model, request(prompt, RANDOM))
    a, b, c = ids[3:6]
    across = RANDOM.model_copy(update={"stop": ("never", f"{a}><{b}><{str(c)[:1]}")})
    missing = RANDOM.model_copy(update={"stop": ("never",)})
    sampled = [GenerateRequest(prompt, s, (), 1, str(i), decode) for i, s in enumerate((across, missing, RANDOM))]
    found, whole, plain = generate(TorchEngine(model), sampled)
    assert (found.ids, found.finish_reason) == (ids[:6], "stop")
    assert found.logprobs == pytest.approx(plain.logprobs[:6], abs=LOGPROB_TOLERANCE)
    assert (whole.ids, whole.finish_reason) == (plain.ids, "length") == (ids, "length")
    with pytest.raises(ConfigError, match="need the request's `decode`"):
        generate(TorchEngine(model), [request(prompt, across)])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_scores_are_the_log_probs_of_the_sampler(model, temperature, monkeypatch):
    engine, prompt = TorchEngine(model), prompts(1)[0]
    (generation,) = generate(engine, [request(prompt, Sampling(temperature=temperature, max_new_tokens=12))])
    ids = [*prompt, *generation.ids]
    scores = asyncio.run(engine.score(ids, temperature))
    assert len(scores) == len(ids) - 1
    assert scores[-12:] == pytest.approx(generation.logprobs, abs=LOGPROB_TOLERANCE)
    monkeypatch.setattr("gymtune.agents.model_passes._SCORED", 5 * 375)  # in pieces of five rows
    assert asyncio.run(engine.score(ids, temperature)) == pytest.approx(scores, abs=LOGPROB_TOLERANCE)
    assert asyncio.run(engine.score(ids[:1])) == []
    for bad, told in (([], "got 0"), ([1] * 513, "1 to 512 tokens .*context is 512.* got 513"), ([999], "outside")):
        with pytest.raises(ConfigError, match=told):
            asyncio.run(engine.score(bad))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_out_of_memory_is_named_and_those_who_wait_go_on(model, monkeypatch, error):
    engine = TorchEngine(model, layers="plain", max_sequences=2)
    requests = [request(p, RANDOM, session=str(i), seed=i) for i, p in enumerate(prompts(3))]
    times, forward = iter([True, True]), type(model).forward

    def breaks_twice(*args):
        if next(times, False):
            raise error
        return forward(*args)

    async def run() -> list[object]:
        tasks = [engine.generate(one) for one in requests]
        return await asyncio.gather(*tasks, engine.score([1, 2]), return_exceptions=True)

    monkeypatch.setattr(type(model), "forward", breaks_twice)
    first, second, third, score = asyncio.run(run())
    for failure in (first, second, score):
        assert isinstance(failure, RunError)
        assert "out of memory" in str(failure)
        assert "max_cache_tokens" in str(failure)
    assert_equal(model, requests[2:], [third])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halved_weights_give_log_probs_in_fp32(model, dtype):
    exact = generate(TorchEngine(model), [request(p, session=str(i)) for i, p in enumerate(prompts(9))])
    model.to(dtype)
    requests = [request(p, session=str(i)) for i, p in enumerate(prompts(9))]
    found = generate(TorchEngine(model), requests)
    firsts = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(exact, found, strict=True) if a.ids[0] == b.ids[0]]
    assert len(firsts) >= 6
    assert all(a == pytest.approx(b, abs=0.3) for a, b in firsts)  # 8 bits, through layers made loud
    assert any(b != torch.tensor(b).to(dtype).item() for _, b in firsts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at import of its compiler
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_model_samples_the_same(model, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
            TorchEngine(model, layers="compiled")
        return
    requests = [request(p, RANDOM, session=str(i), seed=i * 31 + 1) for i, p in enumerate(prompts(9))]
    found = generate(TorchEngine(model.to(device), layers="compiled"), requests)
    assert_equal(model.to("cpu"), requests, found)
