"""What an engine consists of: each part is made here, with those that it works with."""

from collections.abc import Callable, Iterable

from coserve.devices.base import Device
from coserve.engine.calibration import Calibration
from coserve.engine.command_log import CommandLog
from coserve.engine.config import EngineConfig
from coserve.engine.grammars import FindPieces, Grammars
from coserve.engine.host_swap import HostSwap
from coserve.engine.jobs.answers import Answers, Decode
from coserve.engine.jobs.job_set import JobSet
from coserve.engine.jobs.opening import JobOpener
from coserve.engine.outbox import Outbox
from coserve.engine.page_broker import PageBroker
from coserve.engine.request import Chunk
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import ServedAdapters
from coserve.engine.serving import Serving, TextStreamMaker
from coserve.engine.step_loop import StepLoop
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.policies import make_policy
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import DefaultSlo


class EngineParts:
    """The parts of one engine; `EngineCore` has what can be asked of them."""

    def __init__(
        self,
        device: Device,
        latency: LatencyModel,
        config: EngineConfig,
        *,
        end_tokens: Iterable[int],
        text_stream: TextStreamMaker | None,
        decode: Decode | None,
        find_pieces: FindPieces | None,
        keep_profile: Callable[[Profile], None] | None,
    ) -> None:
        """See `EngineCore`."""
        info, policy = device.info, make_policy(config.policy, config.policy_settings)
        self.latency = latency
        self.outbox = Outbox()
        self.default_slo = DefaultSlo(latency, ttft_s=config.ttft_s, tpot_s=config.tpot_s)
        self.log = CommandLog(device)
        send = self.log.send
        self.calibration = Calibration(self.log, info, latency, self.default_slo)
        self.counters = TokenCounters(policy.token_weights)
        self.pages = PageBroker(
            num_pages=info.num_pages,
            page_bytes=info.page_bytes,
            block_tokens=info.block_tokens,
            send=send,
            num_state_pages=info.num_state_pages,
            max_window_bytes=config.weight_window_bytes,
        )
        self.swap = HostSwap(self.pages.cache, info, latency, send)
        self.requests = RequestQueue(self.pages.cache, self.swap, self.counters, send)
        self.adapters = ServedAdapters(device, self.log, self.swap, most=config.max_adapters)
        ends = frozenset(token for token in end_tokens if 0 <= token < info.vocab_size)
        self.grammars = Grammars(device, ends, find_pieces)
        self.serving = Serving(
            device,
            self.requests,
            self.adapters.versions,
            self.counters,
            latency,
            self.default_slo,
            self.grammars,
            end_tokens=ends,
            shares_prefixes=config.share_prefixes,
            text_stream=text_stream,
            emit=self._emit,
            send=send,
        )
        self.opener = JobOpener(device, self.pages, self.adapters, self.log, config.trainable_models)
        self._answers = Answers(self.adapters, self.serving, device, decode=decode)
        self.jobs = JobSet(
            device,
            self.pages,
            self.swap,
            self.adapters,
            self.counters,
            latency,
            log=self.log,
            answers=self._answers,
            emit=self.outbox.put,
        )
        self.loop = StepLoop(
            device,
            latency,
            config,
            policy=policy,
            default_slo=self.default_slo,
            log=self.log,
            pages=self.pages,
            swap=self.swap,
            requests=self.requests,
            serving=self.serving,
            adapters=self.adapters,
            jobs=self.jobs,
            counters=self.counters,
            keep_profile=keep_profile,
        )

    def _emit(self, chunk: Chunk) -> None:
        if not self._answers.take(chunk):
            self.outbox.put(chunk)

    def check_integrity(self) -> None:
        """See `EngineCore`."""
        self.requests.check_integrity()
        self.swap.check_integrity([*self.requests.waiting, *self.jobs.on_host, *self.adapters.on_host])
        held = {page for each in self.requests.running.values() if each.sequence for page in each.sequence.pages}
        self.pages.check_integrity(held, self.jobs.packs, self.jobs.with_optimizer)
