"""What all requests share: the engines, the admission, the list of who is live.

Also the questions that are answered before a request may wait for a slot: is there
such a path, what does the body ask for, which engines could take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from gateway.admission import Admission
from gateway.config import Config
from gateway.dialect import ROUTES, Route, models_route, unknown_path
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.estimate import Estimator, client_timeout, used_tokens
from gateway.ghosts import Reclaim
from gateway.headers import find
from gateway.ledger import Slot
from gateway.reclaim import Reclaimer
from gateway.reloads import Reloads
from gateway.request import Request
from gateway.requests import Requests
from gateway.response import Response
from gateway.retries import Budget
from gateway.routing import Plan, Routing
from gateway.tenants import Charge, Tenant, Tenants, without_keys
from gateway.tickets import Ticket
from gateway.usage import Source, usage_of

DRAIN_FAREWELL_SECONDS = 0.5
"""How long clients may take to be told that the drain is over: the process is to end soon after it."""


class Gateway:
    """The state of one running gateway.

    ``ended`` is called with each request after its end, once; ``reclaimed`` when it is known what
    became of a slot whose request was cut short. ``begun`` is called with each request before anything else.
    """

    def __init__(
        self,
        config: Config,
        engines: Sequence[Engine],
        *,
        ended: Callable[[Request], None],
        reclaimed: Callable[[Engine, Reclaim], None] = lambda *_: None,
        begun: Callable[[Request], None] | None = None,
    ) -> None:
        self.config = config
        self.routing = Routing(config.route, engines)
        self.retries = Budget(config.retry)
        self.admission = Admission(
            queue=config.admission.queue,
            queue_seconds=config.admission.queue_seconds,
            promote_seconds=config.admission.promote_seconds,
        )
        self.tenants = Tenants(config.tenant)
        self.estimator = Estimator(config.admission.max_tokens)
        self._charges: dict[Request, tuple[Tenant, Charge]] = {}
        self.requests = Requests()
        self.retiring: list[Engine] = []
        """Engines that aren't configured any more, and aren't free yet."""
        self.reloads = Reloads()
        self.reclaimers: dict[Engine, Reclaimer] = {}
        self._reclaimed = reclaimed
        for engine in self.engines:
            self._adopt(engine)
        self.draining = self.leaving = False
        self.elsewhere: Mapping[str, tuple[int, int]] = {}
        """Slots, and tokens, that the process before us still uses of the engines, by their URLs."""
        self._well = frozenset(self.engines)
        self.connections: Callable[[], int] = lambda: 0
        """How many client connections are open: the edge that has them says so."""
        self._ended = ended
        self._begun = begun

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, in the order of the configuration."""
        return self.routing.engines

    @property
    def known_engines(self) -> list[Engine]:
        """The engines, and those that aren't configured any more but still have something to end.

        No two of them have one name: an engine that came in place of another is the one that counts.
        """
        names = {engine.name for engine in self.engines}
        return [*self.engines, *(engine for engine in self.retiring if engine.name not in names)]

    def begin(self, request: Request) -> None:
        """Take a request in."""
        known = request.path if request.path in self.routing.paths else models_route(request.path)
        request.route = known or request.route
        self.requests.add(request)
        if self._begun is not None:
            self._begun(request)

    def end(self, request: Request) -> None:
        """Let a request go and have it recorded."""
        request.ended(
            GatewayError(Code.DRAINING, "The gateway ended at once.")
            if self.draining
            else GatewayError(Code.ENGINE_FAILED, "The gateway failed; its log says why.")
        )
        self.requests.remove(request)
        self.settle(request)
        self._ended(request)

    def drain(self) -> None:
        """Stop admitting: whoever hasn't reached an engine is refused now, the rest may end."""
        self.draining = True
        self.admission.close()
        for request in self.requests:
            if not request.dispatched_to_engine:
                request.stop(GatewayError(Code.DRAINING, "The gateway is shutting down; try again."))

    def keep_free(self, engine: Engine, free: bool) -> None:
        """Give an engine nothing more, or something again; what runs on it ends in its own time."""
        engine.health.drained = free
        self.replan()

    def apply(self, config: Config, engines: Sequence[Engine]) -> None:
        """Have another configuration from now on. :meth:`replan` is to follow in the same step."""
        self.config = config
        self.routing = Routing(config.route, engines, self.routing)
        for engine in engines:
            self._adopt(engine)
        self.tenants.apply(config.tenant)
        self.estimator = Estimator(config.admission.max_tokens)
        self.retries.settings = config.retry
        self.admission.apply(
            queue=config.admission.queue,
            queue_seconds=config.admission.queue_seconds,
            promote_seconds=config.admission.promote_seconds,
        )

    def _adopt(self, engine: Engine) -> None:
        if engine not in self.reclaimers:
            self.reclaimers[engine] = Reclaimer(
                engine, give_back=self.admission.give_back, known=self._reclaimed
            )

    def replan(self) -> None:
        """The engines have changed: have everybody who waits look where to go."""
        self.admission.replan(refuse=True)

    def health_changed(self) -> None:
        """An engine may be given requests again, or none any more.

        Everybody who waits is looked at only if that is so for more than a trial: engines may flap.
        """
        now = trio.current_time()
        well = frozenset(engine for engine in self.engines if not engine.health.ejected)
        if well != self._well:
            self._well = well
            self.admission.look_round(one=False)
        if any(engine.health.ejected and engine.health.takes(now) for engine in self.engines):
            self.admission.look_round(one=True)
        self.admission.wake()

    def learnt(self) -> None:
        """An engine has other models: who waits may go there. Nobody is refused for it: lists come and go."""
        self.routing.forget()
        self.admission.replan(refuse=False)

    def end_streams(self) -> None:
        """The time to drain is over: end every answer, with the reason in it where possible."""
        reason = GatewayError(Code.DRAINING, "The gateway is shutting down; this answer ends here.")
        for request in self.requests:
            request.stop(reason, farewell_seconds=DRAIN_FAREWELL_SECONDS)

    def look_at_head(self, request: Request) -> None:
        """Refuse what its head alone rules out.

        Raises GatewayError ``draining`` or ``not_supported``.
        """
        if self.draining:
            raise GatewayError(Code.DRAINING, "The gateway is shutting down; try again.")
        upgrade = (find(request.headers, b"upgrade") or b"").strip().lower()
        if upgrade == b"websocket" or request.method == "CONNECT":
            raise GatewayError(Code.NOT_SUPPORTED, "WebSocket is not supported.")
        if (find(request.headers, b"content-type") or b"").strip().lower().startswith(b"multipart/"):
            raise GatewayError(Code.NOT_SUPPORTED, "Multipart bodies (audio, files) are not supported.")

    def identify(self, request: Request) -> Tenant | None:
        """Find out whose the request is; None where there are no tenants.

        From here on it has no credentials any more: they are nobody's business but ours. Raises
        GatewayError ``invalid_api_key``.
        """
        if not self.tenants:
            return None
        tenant = self.tenants.identify(request.headers)
        request.headers = without_keys(request.headers)
        request.tenant, request.priority = tenant.name, tenant.settings.priority
        return tenant

    def admit(self, request: Request, plan: Plan, body: bytes, tenant: Tenant | None) -> Ticket:
        """Charge the request to its tenant, and make the ticket with which it waits for a slot.

        Raises GatewayError ``model_not_allowed``, ``rate_limited`` or ``invalid_request``.
        """
        if tenant is not None and not tenant.may_use(plan.seen.model):
            raise GatewayError(
                Code.MODEL_NOT_ALLOWED,
                f"Your key may not use the model {(plan.seen.model or '')[:200]!r}.",
                param="model",
            )
        now = trio.current_time()
        tokens = self.estimator.tokens(plan.route.path, plan.seen, body)
        request.reserved_tokens, request.asked_tokens = sum(tokens), tokens[1]
        ticket = self.admission.ticket(
            plan.stages,
            plan.cost,
            tokens=tokens,
            inputs=plan.seen.inputs,
            share=tenant.share if tenant else None,
            timeout=client_timeout(request.headers) - (now - request.arrived),
        )
        if tenant is not None:
            self._charges[request] = tenant, tenant.charge(sum(tokens), now)
        ticket.pick, ticket.answered = plan.pick, plan.answered
        path, model, first = plan.route.path, plan.seen.model, plan.first
        ticket.where = lambda: self.routing.stages(path, model, first)
        plan.take_turn()
        self.retries.request(now)
        return ticket

    def tell_rates(self, request: Request, response: Response) -> None:
        """Say in a response what is left of its tenant's rates, in place of what an engine says."""
        tenant = self.tenants.named(request.tenant) if request.tenant else None
        if tenant is not None and (rates := tenant.rate_headers(trio.current_time())):
            kept = [field for field in response.headers if not field[0].lower().startswith(b"x-ratelimit-")]
            response.headers = kept + rates

    def settle(self, request: Request) -> None:
        """Have the tenant's rates right, once it is known what became of the request.

        That is before the client knows: its next request isn't measured by what this one might have used.
        """
        tenant, charge = self._charges.pop(request, (None, None))
        if tenant is None or charge is None:
            return
        now = trio.current_time()
        if request.meter is not None:  # An engine was sent it.
            tenant.correct(charge, used_tokens(request), now)
        else:
            tenant.refund(charge, now)

    def route(self, request: Request) -> Route:
        """Find the route of an inference request from its head alone.

        Raises GatewayError ``not_found``.
        """
        route = ROUTES.get(request.path)
        if route is None or route.path not in self.routing.paths:
            raise unknown_path(request.path, self.routing.paths)
        if request.method != "POST":
            raise GatewayError(Code.NOT_FOUND, f"{route.path} takes POST requests only.")
        return route

    def plan(self, request: Request, route: Route, body: bytes) -> Plan:
        """Look into the body and choose who could answer it; see :meth:`gateway.routing.Routing.plan`."""
        return self.routing.plan(request, route, body)

    # What engines do with requests.

    def answer_begun(self, request: Request, ticket: Ticket, engine: Engine, slot: Slot) -> None:
        """An engine has begun to answer.

        It may have said by now how long the prompt is: then the room reserved in its cache is put right.
        """
        if ticket.answered is not None:
            ticket.answered(engine)
        if engine.ledger.kv_tokens:
            usage = usage_of(request.meter)
            if usage.prompt is not None and usage.prompt_source is Source.ENGINE:
                self.admission.prompt_counted(ticket, engine, slot, usage.prompt)

    def goes_elsewhere(self, request: Request, ticket: Ticket, engine: Engine) -> bool:
        """Whether a request that ``engine`` has failed goes to another one; its ticket is that one's then."""
        now = trio.current_time()
        ticket.tried.append(engine)
        stage = ticket.next_stage(now)
        if (
            stage is None
            or len(ticket.tried) >= self.config.retry.attempts
            or not self.retries.take(now, live=len(self.requests))
        ):
            return False
        ticket.go(stage)
        return True
