"""The model that drafts: loaded beside the one served, and made a proposer of.

Loading runs in the start's threads; `model_proposer` on the main one, before anything is in the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from config.errors import ConfigError
from config.plan import Plan
from config.settings import Settings
from config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from kvstore.store import KVStore
    from models.base import Runner
    from models.loading.checkpoint import Checkpoint
    from models.loading.tokenizer import LoadedTokenizer
    from models.sampling_state import SamplingState
    from scheduler.proposers.base import Proposer
    from scheduler.proposers.model import ModelProposer
    from scheduler.speculation import Speculation
    from server.loading import Model


def open_drafting(settings: Settings, target: Checkpoint) -> Checkpoint | None:
    """The second model that is to draft, where there is one. Raises ConfigError when its vocabulary has another size,
    ModelError when it cannot be opened."""
    from models.loading.checkpoint import open_checkpoint
    from models.loading.source import resolve_source

    asked = settings.speculative_config
    if asked is None or asked.model is None:
        return None
    checkpoint = open_checkpoint(resolve_source(asked.model))
    ours, theirs = target.config.vocab_size, checkpoint.config.vocab_size
    if ours != theirs:
        raise _other_vocabulary(checkpoint, f"{theirs} tokens instead of {ours}")
    return checkpoint


def check_vocabulary(target: LoadedTokenizer, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where the same number stands for another token."""
    from models.loading.tokenizer import load_tokenizer

    ours, theirs = (t.tokenizer.get_vocab() for t in (target, load_tokenizer(checkpoint)))
    if ours != theirs:
        token = min(ours.keys() ^ theirs.keys() or {t for t in ours if ours[t] != theirs[t]})
        raise _other_vocabulary(checkpoint, f"{token!r} is {theirs.get(token)} instead of {ours.get(token)}")


def attach(plan: Plan, runner: Runner, drafter: Runner) -> None:
    """Give the drafter the target's threads, and its pages: the target's, which are there, or some of its own.

    Raises ConfigError where pages cannot be shared."""
    from models.cpu.runner import CpuRunner

    assert plan.drafting is not None
    own = plan.drafting.num_pages
    if isinstance(drafter, CpuRunner) and isinstance(runner, CpuRunner):
        drafter.join(runner, pages=not own)
    elif not own:
        raise ConfigError('--speculative-config: "self" needs the CPU kernels')
    if own:
        drafter.allocate(own, plan.page_size)


def make_speculation(
    asked: SpeculativeConfig,
    acceptance: Literal["keyed", "rejection"],
    model: Model,
    store: KVStore,
    sampling: SamplingState,
) -> Speculation:
    """What the operator asked for. Measures what steps cost, so the pages must hold nothing yet."""
    from scheduler.proposers.lookahead import LookaheadProposer
    from scheduler.proposers.ngram import NgramProposer
    from scheduler.speculation import Speculation
    from scheduler.step_times import measure

    rejection = acceptance == "rejection"
    proposer: Proposer
    match asked.method:
        case "ngram":
            proposer = NgramProposer(
                asked.prompt_lookup_min, asked.prompt_lookup_max, share_outputs=asked.share_outputs
            )
        case "lookahead":
            proposer = LookaheadProposer(asked.num_speculative_tokens)
        case _:
            proposer = model_proposer(asked, model, store, sampling, keep_probabilities=rejection)
    return Speculation(
        proposer,
        measure(model.runner, model.plan.num_pages, model.plan.page_size),
        tokens=asked.num_speculative_tokens,
        branches=asked.branches,
        adaptive=asked.adaptive,
        rejection=rejection,
    )


def model_proposer(
    asked: SpeculativeConfig, model: Model, store: KVStore, sampling: SamplingState, *, keep_probabilities: bool
) -> ModelProposer:
    """The proposer of the drafting model over the target's store and sampling; it measures what drafting takes."""
    from kvstore.store import KVStore
    from scheduler.proposers.model import ModelProposer
    from scheduler.proposers.model_pages import DraftPages, OwnPages, TargetPages

    plan = model.plan
    assert plan.drafting is not None
    assert model.drafter is not None
    pages: DraftPages = TargetPages(store)
    if plan.drafting.num_pages:
        own = KVStore(
            num_pages=plan.drafting.num_pages,
            page_size=plan.page_size,
            max_sequences=plan.max_num_seqs * asked.branches,
            max_model_len=min(plan.max_model_len, model.drafter.config.max_position),
            prefix_caching=store.prefix_caching,
        )
        pages = OwnPages(own)
    return ModelProposer(
        asked.method,
        model.drafter,
        pages,
        sampling,
        budget=plan.max_num_batched_tokens,
        keep_probabilities=keep_probabilities,
    )


def _other_vocabulary(checkpoint: Checkpoint, difference: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {checkpoint.name} has another vocabulary: {difference}")
