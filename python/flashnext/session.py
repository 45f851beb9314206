"""Session: a checkpoint opened on a device, ready to answer.

Long because every option of what people call most is documented here.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from flashnext import _core, checks, evidence, options
from flashnext.errors import InputError
from flashnext.generation import Generation
from flashnext.handle import Handle
from flashnext.marks import TurnMarks
from flashnext.messages import Message, check_messages
from flashnext.pack import open_text_side
from flashnext.paths import checkpoint_folder
from flashnext.policy import Policy
from flashnext.requests import (
    Answer,
    GenerateOptions,
    OnPrefill,
    OnRequestToken,
    OnToken,
    run_batch,
)
from flashnext.stream import Stream
from flashnext.template import prompt_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int] | Sequence[Message] | npt.NDArray[Any]
Progress = Callable[[str, int, int], None]


class Session:
    """A checkpoint opened on a device.

    The logits at a position depend on the token ids before it and on nothing else: not on threads,
    lanes, chunk size, reused prefixes or other requests. So the same call gives the same answer.

    Any number of threads may call at once: requests come and go while others run, up to ``lanes``
    of them at a time, and the rest wait for a lane. ``submit`` is for scripts that do other things
    meanwhile, and for coroutines.

    Args:
        path: checkpoint folder (``config.json``, ``*.safetensors``, ``tokenizer.json``).
        device: ``auto`` (a supported GPU if there is one, else the host; ``notes`` says what was
            taken), ``host``, ``cuda`` or ``cuda:N``.
        window: most tokens of one sequence, prompt and answer together. None: the smaller of
            32768 and the model's limit.
        lanes: how many requests run together; others wait.
        threads: CPU threads; 0: as many as the process may use.
        levels: activation levels of the integer linears, 32258 or 127.
        seed: seed of sampling where a request gives none, and of the host device's order of work
            (which changes no bit).
        isa: instruction set of the host device, ``auto`` or one that this CPU has; for tests.
        graphs: replay captured graphs of the steps (the bits are the same without).
        chunk: prompt tokens a step; 0: 512, or 2,048 with experts in host memory, which are
            streamed once a step.
        kv_gb: GB of 2**30 bytes for the KV pages, which requests and remembered prefixes share by
            need; at least one window. None: one window, and a quarter of one for each further lane.
            A request that finds no page waits, and its answer is the same.
        token_wait: seconds that a request should wait at most for its next token while prompts of
            others are read beside it: parts of prompts are sized for it. With experts in host
            memory a part reads most of them over the link, which may take longer.
        prefix_snapshots: how many states are kept for prefix reuse.
        memory_limit: most bytes that may be allocated on the device; 0: all that it has free. On
            the host device it is a limit on everything but the experts in host memory.
        vram_gb: the same in GB of 2**30 bytes, as cards are sold; give one of the two.
        experts: where the routed experts live. ``resident``: on the device. ``offload``: in host
            memory, with ``cache_lines`` of every layer on the device as well; an expert that a
            token needs and that has no line is fetched or computed by the processor. ``auto``
            (default): resident when that fits. The answers are the same.
        cache_lines: experts a layer that the device keeps, from the model's experts a token to all
            of a layer; None: as many as fit into the memory.
        ram_gb: most RAM that the experts may take, in GB of 2**30 bytes; None: what is free but for
            a reserve. Those that find no place stay in the checkpoint's files, and the processor
            computes them.
        cpu_misses: which misses the processor computes instead of fetching them: ``off``, ``auto``
            (a share that is measured at open; none is a possible answer), or N: at most N of a
            layer and step.
        cpu_threads: threads that compute misses; 0: one a core but one.
        policy: what the device keeps: ``recency`` (None), ``frequency``, ``static``, ``random``, or
            an object of a class derived from :class:`flashnext.Policy`.
        profile: file of how often experts were used. It is read at open to choose what the device
            keeps at first, and replaced at close by the uses up to then. None: no file, but for
            the demo model the one that came with it, which is never written; False: none at all.
        plan_every: steps between two questions to the policy, the first before the first step.
        lockstep: promotions of the policy land before the next step, so that hits do not depend on
            the speed of copies and are those of a replay; for comparisons.
        trace: file to record the routing of all steps into, see :meth:`record`.
        progress: called as ``progress(stage, done, total)`` while the checkpoint loads.

    Attributes:
        path: the checkpoint folder.
        device: the device in use, ``host`` or ``cuda:N``.
        window: most tokens of one sequence.
        lanes: requests that run together.
        shape: dimensions of the model by name.
        vocab_size: columns of the logits, padding included.
        tokenizer: the checkpoint's tokenizer.
        stop_ids: ids that end an answer.
        notes: what is worth knowing: device choice, oddities of the checkpoint, where the experts
            are, and what failed without ending the run (a policy, a profile, a recording).

    Raises:
        CheckpointError: the folder is not a sound checkpoint of this architecture.
        InputError: an option is wrong.
        OutOfMemory: names the parts and the sum that did not fit.
        DeviceError: the device asked for is not there or failed.

    Example:
        >>> import flashnext
        >>> session = flashnext.Session(flashnext.demo_path())
        >>> session.generate("Add 17 and 14.").text
        '17 + 14 = 31.'
        >>> session.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        window: int | None = None,
        lanes: int = 1,
        threads: int = 0,
        levels: int = 32258,
        seed: int = 0,
        isa: str = "auto",
        graphs: bool = True,
        chunk: int = 0,
        kv_gb: float | None = None,
        token_wait: float = 0.2,
        prefix_snapshots: int = 16,
        memory_limit: int = 0,
        vram_gb: float | None = None,
        experts: str = "auto",
        cache_lines: int | None = None,
        ram_gb: float | None = None,
        cpu_misses: options.CpuMisses = "auto",
        cpu_threads: int = 0,
        policy: str | Policy | None = None,
        profile: options.ProfilePath = None,
        plan_every: int = 16,
        lockstep: bool = False,
        trace: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> None:
        checks.unknown_options(unknown, _parameters(Session.__init__), "Session")
        checks.callback("progress", progress)
        self.path: Path = checkpoint_folder(path)
        self._seed = checks.whole("seed", seed, 0, checks.MAX_SEED)
        text = open_text_side(self.path)
        self.tokenizer = text.tokenizer
        self.stop_ids: list[int] = text.stop_ids
        self._template = text.template
        self._text_notes = text.notes
        core = _core.Session(
            str(self.path),
            device=checks.word("device", device),
            window=0 if window is None else checks.whole("window", window, 1, 2**31 - 1),
            lanes=checks.whole("lanes", lanes, 1, 2**31 - 1),
            threads=checks.whole("threads", threads, 0, 2**31 - 1),
            levels=checks.whole("levels", levels, 1, 2**31 - 1),
            seed=self._seed,
            isa=checks.word("isa", isa),
            graphs=checks.flag("graphs", graphs),
            chunk=checks.whole("chunk", chunk, 0, 2**31 - 1),
            kv_bytes=options.memory_bytes("kv_gb", kv_gb),
            token_wait=checks.seconds("token_wait", token_wait),
            prefix_snapshots=checks.whole("prefix_snapshots", prefix_snapshots, 0, 2**31 - 1),
            vocabulary=self.tokenizer.all_bytes(),
            memory_limit=options.limit_bytes(vram_gb, memory_limit),
            token_limit=self.tokenizer.size,
            capabilities=list(evidence.accepted_capabilities()) if device != "host" else [],
            progress=progress,
            **options.expert_options(
                self.path,
                experts=experts,
                ram_gb=ram_gb,
                cache_lines=cache_lines,
                cpu_misses=cpu_misses,
                cpu_threads=cpu_threads,
                policy=policy,
                profile=profile,
                plan_every=plan_every,
                lockstep=lockstep,
                trace=trace,
            ),
        )
        self._core: _core.Session | None = core
        self._marks = self._turn_marks()
        self.shape: dict[str, Any] = dict(core.shape)
        self.vocab_size: int = int(self.shape["vocab"])
        self.window: int = core.window
        self.lanes: int = core.lanes
        self.device: str = core.device
        self._notes: list[str] = [*self._text_notes, *core.notes]

    # ---- generating -----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt | None = ...,
        *,
        stream: Literal[False] = ...,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Prompt | None = ...,
        *,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> Stream: ...
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        chat: bool | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Generation | Stream:
        """Answers one prompt.

        The defaults are greedy, so that an answer can be reproduced; ``generation_config.json`` of
        the checkpoint gives the stop ids only. Sampling is reproducible too: a draw depends on
        ``seed`` and the position alone.

        Args:
            prompt: a text, token ids, or a list of messages. A text is one user message of a chat
                when the checkpoint has a chat template (see ``chat``), else it is continued as it
                stands. Token ids are taken as they are.
            messages: list of ``{"role": ..., "content": ...}`` instead of ``prompt``.
            max_new_tokens: most tokens of the answer. None: 256, or what the window has left.
            temperature: 0 takes the likeliest token (lowest id on a tie); else logits are divided
                by it.
            top_p: keep the likeliest tokens until their probability reaches this (1: all).
            top_k: keep this many likeliest tokens (0: all).
            min_p: drop tokens less likely than this share of the likeliest (0: none).
            seed: seed of the draws, 0 to 2**64 - 1. None: the session's.
            stop: text or texts that end the answer; they are not part of it.
            stream: return a :class:`Stream` of text pieces instead of waiting.
            on_token: called as ``on_token(token, text)`` for each new token with the text that
                became certain (maybe empty), and at the end as ``on_token(None, text)`` if text
                was still held back. A true value cancels the rest. It runs on the thread that
                waits for the answer or reads the stream.
            on_prefill: called as ``on_prefill(done, total)`` as the prompt is read, in tokens.
            chat: for a text prompt: True applies the chat template, False does not.
            add_generation_prompt: template argument: end with the opening of an answer.
            enable_thinking: template argument; None leaves it to the template.
            tools: template argument: descriptions of tools.
            template_arguments: further arguments for the template.
            **unknown: refused, with the near matches named.

        Returns:
            The finished :class:`Generation`, or a :class:`Stream` with ``stream=True``.

        Raises:
            InputError: the request is wrong, or the session is closed.
            RequestFailed: the request failed; the session goes on.
            OutOfMemory: the state does not fit.
            KeyboardInterrupt: Ctrl-C; the session stays usable.
        """
        checks.unknown_options(unknown, _parameters(Session.generate), "generate")
        handle = self.submit(
            prompt,
            messages=messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            on_token=on_token,
            on_prefill=on_prefill,
            chat=chat,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            tools=tools,
            template_arguments=template_arguments,
        )
        if stream:
            return Stream(handle)
        try:
            return handle.result()
        except BaseException:  # Ctrl-C too: nobody will read the rest
            handle.cancel()
            raise

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        chat: bool | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Handle:
        """Starts a request and returns at once; the arguments are those of :meth:`generate`.

        Returns:
            A :class:`Handle`: iterate over it, call ``result()``, ``await`` it, or cancel it.

        Raises:
            InputError: the request is wrong, or the session is closed.
        """
        checks.unknown_options(unknown, _parameters(Session.submit), "submit")
        checks.callback("on_token", on_token)
        checks.callback("on_prefill", on_prefill)
        core = self._open_core()
        if messages is not None:
            if prompt is not None:
                raise InputError("prompt and messages are both given; give one of them")
            prompt = check_messages(messages)
        if checks.is_batch(prompt):
            raise InputError("prompt is a list of prompts; use generate_batch for several at once")
        given = {
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
            "tools": tools,
        }
        ids = self._prompt_ids(prompt, chat, template_arguments, **given)
        sampling = checks.sampling(
            temperature, top_p, top_k, min_p, self._seed if seed is None else seed, stop
        )
        submission = core.submit([self._request(ids, max_new_tokens, sampling)])
        return Handle(submission, Answer(self.tokenizer, sampling.stop), on_token, on_prefill)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        on_token: OnRequestToken | None = None,
        chat: bool | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> list[Generation]:
        """Answers several prompts, up to ``lanes`` of them at a time.

        Each answer is the one that ``generate`` gives for the prompt alone. A request that fails,
        or whose callback raises, has the finish reason ``failed`` and says why in ``error``; the
        others go on.

        Args:
            prompts: each a text, token ids, or a list of messages.
            max_new_tokens: most tokens of each answer. None: 256, or what the window has left
                after each prompt.
            temperature: see :meth:`generate`; so are the other options not listed here.
            top_p: see :meth:`generate`.
            top_k: see :meth:`generate`.
            min_p: see :meth:`generate`.
            seed: every request draws with this seed.
            stop: see :meth:`generate`.
            on_token: called as ``on_token(request, token, text)``; a true value cancels that
                request.
            chat: see :meth:`generate`.
            template_arguments: arguments for the chat template, such as ``enable_thinking``.
            **unknown: refused, with the near matches named.

        Returns:
            One :class:`Generation` a prompt, in the order given.

        Raises:
            InputError: a request is wrong (nothing has run then).
        """
        checks.unknown_options(unknown, _parameters(Session.generate_batch), "generate_batch")
        checks.callback("on_token", on_token)
        core = self._open_core()
        if not checks.is_list(prompts) or len(prompts) == 0:
            raise InputError("prompts must be a list with at least one prompt")
        ids = [self._prompt_ids(prompt, chat, template_arguments) for prompt in prompts]
        sampling = checks.sampling(
            temperature, top_p, top_k, min_p, self._seed if seed is None else seed, stop
        )
        requests = [self._request(one, max_new_tokens, sampling) for one in ids]
        return run_batch(core, self.tokenizer, requests, sampling.stop, on_token)

    def cancel(self) -> None:
        """Ends all requests of this session with finish reason ``cancelled``, from any thread."""
        core = self._core
        if core is not None:
            core.cancel()

    # ---- looking inside -------------------------------------------------------------------------

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after every token of a sequence.

        Args:
            ids: token ids.

        Returns:
            float32 [tokens, vocab_size]; row t predicts token t + 1. Columns from
            ``tokenizer.size`` on are padding. The array takes 4 * tokens * vocab_size bytes.

        Raises:
            InputError: empty, an id out of range, or more tokens than the window.
        """
        return self._open_core().logits(self._sequence(ids))

    def score(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probability (natural) of each token given those before it.

        Args:
            ids: token ids, such as ``tokenize(text)``.

        Returns:
            float32 [tokens]. The first is NaN: nothing comes before it, so nothing predicts it.
            Probabilities are over all ``vocab_size`` columns.

        Raises:
            InputError: as for :meth:`logits`.
        """
        following = self._open_core().score(self._sequence(ids))
        return np.concatenate([np.full(1, np.nan, np.float32), following])

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens written in it become their ids; none is added."""
        if not isinstance(text, str):
            raise InputError(f"text is a {type(text).__name__}, expected a string")
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; ``special=True`` keeps special tokens such as ``<|im_end|>``."""
        if checks.is_list(ids) and len(ids) == 0:
            return ""
        return self.tokenizer.decode(checks.token_ids(ids, self.vocab_size), special=special)

    def chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **arguments: Any,
    ) -> str:
        """Prompt text of a chat, by the checkpoint's own template.

        Args:
            messages: list of ``{"role": ..., "content": ...}``.
            add_generation_prompt: end with the opening of an answer.
            tools: descriptions of tools, for templates that know them.
            **arguments: go to the template, such as ``enable_thinking=False``.

        Raises:
            InputError: malformed messages, or a checkpoint without a template.
        """
        if self._template is None:
            raise InputError(
                f"{self.path} has no chat template; give a text with chat=False, or token ids"
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **arguments
        )

    @property
    def notes(self) -> list[str]:
        """See the class. After close, those of before."""
        core = self._core
        if core is not None:
            with contextlib.suppress(InputError):  # another thread closes the session
                self._notes = [*self._text_notes, *core.notes]
        return list(self._notes)

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template; without one, messages are refused."""
        return self._template is not None

    def stats(self) -> dict[str, Any]:
        """Counters since the session was opened, as of a few milliseconds ago; waits for no step.

        Returns:
            ``requests``, ``prompt_tokens``, ``reused_tokens``, ``decode_tokens``,
            ``prefill_seconds``, ``decode_seconds``, ``steps`` and more of the engine's; of the
            requests that are there ``queued``, ``reading`` and ``decoding``; ``cancelled``,
            ``failed``, ``preempted`` (put back into the queue for want of KV pages);
            ``longest_wait``, most seconds between two tokens of an answer; ``memory`` has the bytes
            of every part by space and name.

            With experts in host memory ``cache`` has ``lines`` of ``experts`` a layer and
            ``line_bytes``; ``hit_rate`` of decode steps, counted in distinct experts a layer and
            step; ``fetched_bytes``, ``cpu_bytes`` (computed by the processor),
            ``promoted_bytes`` (copied by the policy) and ``streamed_bytes`` (for prompts);
            ``layers``, a dict a layer, and ``sum``: ``steps``, ``hits``, ``fetched``,
            ``installed``, ``on_cpu``, ``promoted``, ``streamed`` in experts, ``fetch_ns`` and
            ``wait_ns`` (from asking the processor until its rows were on the device, beside the
            fetches); ``policy`` that runs,
            ``fault`` of the one asked for and ``stall`` of the processor, or empty; ``cpu``,
            ``cpu_share`` and ``cpu_share_text``; ``bank``: bytes pinned, pageable and left in the
            files.

        Raises:
            InputError: the session is closed.
        """
        return self._open_core().stats()

    def record(self, path: str | os.PathLike[str]) -> None:
        """Records from now on which experts every step chooses, for ``flashnext replay``.

        A replay gives this session's own hits when nothing ran before: pass ``trace`` to the
        session for that. The file is replaced; what is written is sound at any time.

        Raises:
            InputError: experts are resident, a recording runs, or the file cannot be written.
        """
        self._open_core().record(options.trace_file(path))

    def stop_recording(self) -> int:
        """Ends the recording; closing the session does too.

        Returns:
            How many records it has.

        Raises:
            InputError: none runs, or not all could be written.
        """
        return self._open_core().stop_recording()

    # ---- lifetime -------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels what runs and frees the model. Later calls raise InputError; twice is fine.

        Warns (RuntimeWarning) when the profile or the rest of a recording cannot be written.
        """
        core = self._core
        if core is None:
            return
        self._notes = self.notes
        problem = core.close()  # refused within a policy: then the session stays open
        self._core = None
        if problem:
            self._notes.append(problem)
            warnings.warn(problem, RuntimeWarning, stacklevel=2)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _open_core(self) -> _core.Session:
        core = self._core
        if core is None:
            raise InputError("the session is closed; open a new one")
        return core

    def _request(
        self, ids: list[int], max_new_tokens: int | None, sampling: checks.Sampling
    ) -> dict[str, Any]:
        """What the engine is told of a request."""
        marks = self._marks.find(ids)
        return {
            "prompt": ids,
            "max_new_tokens": checks.window_room(len(ids), max_new_tokens, self.window),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "stop_ids": self.stop_ids,
            "stop_texts": [text.encode() for text in sampling.stop],
            "marks": marks.turns,
            "shared_mark": marks.shared,
        }

    def _turn_marks(self) -> TurnMarks:
        """What the template puts before a user's turn and before the system's text."""

        def opening(role: str) -> list[int]:
            # A text that the template cannot contain tells where the message begins.
            marker = "\x1a"
            if self._template is None:
                return []
            try:
                text = self.chat_template(
                    [{"role": role, "content": marker}, {"role": "user", "content": marker}],
                    add_generation_prompt=False,
                )
            except InputError:  # a template that has no such turn
                return []
            return self.tokenizer.encode(text.split(marker)[0])

        return TurnMarks(opening("user"), opening("system"))

    def _sequence(self, ids: Sequence[int]) -> list[int]:
        checked = checks.token_ids(ids, self.vocab_size)
        checks.check_length(checked, self.window)
        return checked

    def _prompt_ids(
        self,
        prompt: Prompt | None,
        chat: bool | None,
        template_arguments: Mapping[str, Any] | None,
        **options: Any,
    ) -> list[int]:
        if prompt is None:
            raise InputError("there is no prompt: give a text, token ids or messages")
        arguments = prompt_arguments(
            chat=chat,
            prompt=prompt,
            has_template=self._template is not None,
            arguments=template_arguments,
            **options,
        )
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty: the model needs something to start from")
            if chat is None:
                chat = self._template is not None
            text = (
                self.chat_template([{"role": "user", "content": prompt}], **arguments)
                if chat
                else prompt
            )
            return checks.token_ids(self.tokenizer.encode(text), self.vocab_size, "the prompt")
        if checks.is_messages(prompt):
            text = self.chat_template(prompt, **arguments)  # type: ignore[arg-type]
            return checks.token_ids(self.tokenizer.encode(text), self.vocab_size, "the prompt")
        return checks.token_ids(prompt, self.vocab_size, "the prompt")


def _parameters(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.signature(function).parameters.values()
    return [p.name for p in kinds if p.kind is not inspect.Parameter.VAR_KEYWORD]
