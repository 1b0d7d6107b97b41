"""The core without a socket: messages in by `handle`, work by `step`, answers in `outputs`.

One request's failure ends that request; a failed step ends the requests that were in it. Neither ends the core.
Every Generate gets exactly one last message: an Output with `finish`, or RequestFailed.
"""

import logging
import time
from collections.abc import Callable

import torch

from loraplane_core.errors import (
    ArtifactUnavailable,
    ContextLengthExceeded,
    InsufficientMemory,
    Internal,
    InvalidParameter,
    LoraplaneError,
    Withdrawn,
)
from loraplane_engine import messages as m
from loraplane_engine.adapters.host import Wakeup
from loraplane_engine.adapters.residency import Residency
from loraplane_engine.adapters.words import Adapter
from loraplane_engine.core import sampling, setup
from loraplane_engine.core.sampling import SampleRow
from loraplane_engine.core.scheduler import Scheduler
from loraplane_engine.core.stats import Reporter
from loraplane_engine.core.words import Batch, Chunk, Sequence
from loraplane_engine.memory.arena import Arena
from loraplane_engine.options import CoreOptions

log = logging.getLogger(__name__)

Sampler = Callable[[torch.Tensor, list[SampleRow]], sampling.Sampled]


class EngineCore:
    """`sampler` and `arena_type` are seams for tests; `wakeup` becomes readable when `step` has news to find."""

    def __init__(
        self,
        options: CoreOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        arena_type: type[Arena] = Arena,
        sampler: Sampler = sampling.sample,
    ) -> None:
        self.base = setup.load(options, arena_type)
        self.outputs: list[m.FromCore] = []
        self.wakeup = Wakeup()
        self.stopping = False
        self._clock, self._sampler = clock, sampler
        self.residency = Residency(
            arena=self.base.arena,
            table=self.base.table,
            lora=self.base.lora,
            layout=self.base.layout,
            groups=self.base.groups,
            limits=self.base.limits,
            wake=self.wakeup.set,
            emit=self.outputs.append,
            clock=clock,
        )
        self.scheduler = Scheduler(
            self.base.arena,
            self.residency,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            on_admitted=self._admitted,
            clock=clock,
        )
        self._reporter = Reporter(self.base.arena, self.residency, self.scheduler, clock=clock)
        self._sequences: dict[str, Sequence] = {}
        self.outputs.append(
            m.CoreReady(
                page_bytes=self.base.arena.page_bytes,
                layout=str(self.base.layout),
                max_model_len=self.base.max_model_len,
                vocab_size=self.base.config.vocab_size,
                lora_form=self.base.lora.name,
                threads=torch.get_num_threads(),
            )
        )

    # --- the loop's three verbs

    def handle(self, message: m.ToCore) -> None:
        try:
            self._dispatch(message)
        except Exception as error:
            if not isinstance(message, m.Generate):
                log.exception("a %s message failed", type(message).__name__)
                return
            if not isinstance(error, LoraplaneError):
                log.exception("request %s failed", message.request)
            self._refuse(message.request, error)

    def step(self) -> bool:
        """One round: collect loads and deadlines, compute one batch. False when there was nothing to compute."""
        self._settle()
        batch = self.scheduler.schedule()
        if batch is None:
            self._fail_stuck()
            self._report(idle=True)
            return False
        started = time.perf_counter()
        try:
            logits, slices = self.base.runner.forward(batch)
            self._accept(batch, logits, slices)
        except Exception:
            log.exception("a step of %d requests failed", len(batch.chunks))
            for chunk in batch.chunks:
                self._fail(chunk.sequence, Internal("the step that computed this request failed"))
        self._reporter.totals.count(batch, time.perf_counter() - started)
        self._report(idle=False)
        return True

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep when `step` had nothing to do; None = until something arrives."""
        until = [adapter.drain_until for adapter in self.residency.draining() if adapter.drain_until is not None]
        until += self.scheduler.pins_due()
        if self.residency.waiting or (self.scheduler.waiting.waiting and not self.residency.loading):
            until.append(self._clock() + 0.05)
        return max(0.0, min(until) - self._clock()) if until else None

    def close(self) -> None:
        self.residency.close()
        self.wakeup.close()

    # --- messages

    def _dispatch(self, message: m.ToCore) -> None:
        match message:
            case m.Generate():
                self._generate(message)
            case m.Abort():
                sequence = self._sequences.get(message.request)
                if sequence is not None:
                    self._finish(sequence, m.Output(request=message.request, tokens=[], finish="abort"))
            case m.LoadAdapter():
                self.residency.load(message)
            case m.UnloadAdapter():
                self.residency.unload(message.key, self._clock() + message.drain_s)
            case m.MarkAdapter():
                self.residency.mark(message.key, message.pinned, message.warm_wanted)
            case m.Shutdown():
                self.stopping = True

    def _generate(self, message: m.Generate) -> None:
        if message.request in self._sequences:
            raise InvalidParameter(f"the request id {message.request} is in use", param="request")
        self._check_sizes(message)
        adapter = None if message.adapter is None else self._adapter(message.adapter)
        cold = message.cold or (adapter is not None and adapter.image.host is None)  # host or device: warm
        sequence = Sequence.of(message, adapter, self._clock(), cold=cold, vocabulary=self.base.config.vocab_size)
        self._sequences[message.request] = sequence
        self.scheduler.add(sequence)
        if adapter is not None:
            self.residency.use(adapter, message.request)

    def _check_sizes(self, message: m.Generate) -> None:
        prompt, limit = message.prompt, self.base.max_model_len
        if not prompt:
            raise InvalidParameter("the prompt is empty", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self.base.config.vocab_size:
            raise InvalidParameter(
                f"the prompt holds a token outside 0..{self.base.config.vocab_size - 1}", param="prompt"
            )
        if any(not 0 <= token < self.base.config.vocab_size for token in message.sampling.stop_token_ids):
            raise InvalidParameter("stop_token_ids holds a token outside the vocabulary", param="stop_token_ids")
        total = len(prompt) + message.sampling.max_tokens
        if message.sampling.max_tokens < 1:
            raise InvalidParameter("max_tokens must be at least 1", param="max_tokens")
        if total > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and max_tokens is {message.sampling.max_tokens}; "
                f"together at most {limit} fit this model",
                param="max_tokens" if len(prompt) < limit else "prompt",
            )

    def _adapter(self, key: m.AdapterKey) -> Adapter:
        adapter = self.residency.adapters.get(key)
        if adapter is None:
            raise ArtifactUnavailable(f"the adapter {key.ref} is not loaded in this engine")
        if adapter.drain_until is not None:
            raise Withdrawn(f"the adapter {key.ref} is being unloaded")
        if not self.residency.device.can_ever_fit(adapter.image):
            raise InsufficientMemory(f"the adapter {key.ref} does not fit beside the pinned ones")
        return adapter

    # --- one step

    def _settle(self) -> None:
        self.wakeup.clear()
        for adapter in self.residency.collect():
            for request in list(adapter.requests):
                self._fail(self._sequences[request], ArtifactUnavailable(f"{adapter.key.ref} could not be loaded"))
            self.residency.drop(adapter)
        self.residency.place_waiting()
        self.scheduler.bring_pinned()
        now = self._clock()
        for adapter in [a for a in self.residency.draining() if a.drain_until is not None and a.drain_until <= now]:
            for request in list(adapter.requests):
                self._finish(self._sequences[request], m.Output(request=request, tokens=[], finish="abort"))

    def _accept(self, batch: Batch, logits: torch.Tensor, slices: list[slice]) -> None:
        """Sample what is due, advance every sequence, send what is new."""
        sampling_chunks: list[Chunk] = []
        rows: list[int] = []
        for chunk, wanted in zip(batch.chunks, slices, strict=True):
            if chunk.sequence.wants_prompt_logits:
                self._gather_prompt_logprobs(chunk, logits[wanted])
            if chunk.samples:
                sampling_chunks.append(chunk)
                rows.append(wanted.stop - 1)
            self.scheduler.computed(chunk)
        if not rows:
            return
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        forbidden = [SampleRow(c.sequence.state, self._forbidden(c.sequence)) for c in sampling_chunks]
        sampled = self._sampler(logits, forbidden)
        for index, chunk in enumerate(sampling_chunks):
            if sampled.finite[index]:
                self._append(chunk.sequence, sampled.tokens[index], sampled.logprobs[index])
            else:
                self._fail(chunk.sequence, Internal("the model's output was not finite"))

    def _append(self, sequence: Sequence, token: int, logprob: m.TokenLogprob | None) -> None:
        self._reporter.totals.generated += 1
        params = sequence.params
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in self.base.end_tokens)
        sequence.ids[sequence.length] = token
        sequence.length += 1
        sequence.state.accept(token)
        finish: m.FinishReason | None = None
        if stops:
            finish = "stop"
        elif sequence.generated >= params.max_tokens:
            finish = "length"
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        output = m.Output(
            request=sequence.request,
            tokens=[] if stops else [token],
            logprobs=None if logprob is None else [] if stops else [logprob],
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_token=token if stops else None,
        )
        if finish is None:
            self.outputs.append(output)
        else:
            self._finish(sequence, output)

    def _forbidden(self, sequence: Sequence) -> tuple[int, ...]:
        params = sequence.params
        if sequence.generated >= params.min_tokens:
            return ()
        return (*params.stop_token_ids, *(() if params.ignore_eos else self.base.end_tokens))

    def _gather_prompt_logprobs(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """The logits of position i judge the prompt's token i + 1; chunks come in order, recomputation repeats none."""
        sequence = chunk.sequence
        gathered = sequence.prompt_logprobs or []
        first = len(gathered)  # the next token to judge
        last = min(chunk.start + chunk.tokens, sequence.prompt_length - 1)
        if last < first:
            return
        rows = logits[first - 1 - chunk.start : last - chunk.start]
        tokens = sequence.ids[first : last + 1].tolist()
        gathered += sampling.logprobs_of(rows, tokens, [sequence.params.logprobs or 0] * len(tokens))

    # --- ends

    def _admitted(self, sequence: Sequence) -> None:
        if sequence.admissions == 1:
            queue_ms = (self._clock() - sequence.arrival) * 1e3
            self.outputs.append(m.Scheduled(request=sequence.request, queue_ms=queue_ms, cold=sequence.cold))

    def _fail_stuck(self) -> None:
        for sequence in self.scheduler.stuck():
            what = "its KV cache" if sequence.adapter is None else f"the adapter {sequence.adapter.key.ref}"
            self._fail(sequence, InsufficientMemory(f"{what} finds no room beside what is pinned"))

    def _finish(self, sequence: Sequence, last: m.Output | m.RequestFailed) -> None:
        """The one way out: frees everything the request holds, and sends its last message."""
        del self._sequences[sequence.request]
        self.scheduler.finish(sequence)
        self.outputs.append(last)
        if sequence.adapter is not None:
            self.residency.release(sequence.adapter, sequence.request)

    def _fail(self, sequence: Sequence, error: LoraplaneError) -> None:
        if sequence.request in self._sequences:
            self._finish(sequence, _failed(sequence.request, error))

    def _refuse(self, request: str, error: Exception) -> None:
        if not isinstance(error, LoraplaneError):
            error = Internal("the request could not be started")
        sequence = self._sequences.get(request)
        if sequence is not None and not isinstance(error, InvalidParameter):
            self._fail(sequence, error)
        else:
            self.outputs.append(_failed(request, error))

    def _report(self, *, idle: bool) -> None:
        stats = self._reporter.due(now_at_latest=idle)
        if stats is not None:
            self.outputs.append(stats)


def _failed(request: str, error: LoraplaneError) -> m.RequestFailed:
    return m.RequestFailed(request=request, status=error.status, code=error.code, message=error.message)
