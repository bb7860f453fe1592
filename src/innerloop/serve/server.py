"""From a policy loader to a server: ports, life cycle, signals."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from websockets.asyncio.server import Server as WebsocketServer
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from innerloop.client.packing import keep_large_blocks
from innerloop.client.wire import PROTOCOL
from innerloop.contract import Policy
from innerloop.serve.access import ServeError, ServeOptions, bracketed, port_in_use
from innerloop.serve.metrics import Metrics
from innerloop.serve.pages import Pages
from innerloop.serve.truth import Truth
from innerloop.serve.websocket import Connection
from innerloop.serve.worker import State, Worker

log = logging.getLogger(__name__)
FLUSH_SECONDS = 2.0  # the longest it waits for a client to take its last answer
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
DRAIN_SECONDS = 30.0  # the longest a shutdown waits for decisions in flight


class Transport(Protocol):
    """A second door beside the websocket: gRPC or ZeroMQ."""

    port: int

    async def start(self) -> None:
        """Bind and begin to answer."""
        ...

    async def stop(self) -> None:
        """Stop accepting, let answers in flight out, unbind."""
        ...


class Server:
    """Serves one policy until told to stop. Lives in an event loop; `load` runs in the worker's thread."""

    def __init__(
        self, load: Callable[[], Policy], options: ServeOptions, say: Callable[[str], None] = log.info
    ) -> None:
        options.check()
        keep_large_blocks()
        self.options = options
        self.metrics = Metrics()
        self.worker = Worker(load, self.metrics, capacity=options.max_clients, limits=options.limits)
        self.truth = Truth(self.worker, self.metrics, options)
        self.port = 0
        self.http_port = 0
        self._load = load
        self._say = say
        self._pages = Pages(self.worker, self.truth, options.host, options.token)
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()  # ready, or failed for good
        self._over = asyncio.Event()  # told to stop, or broken
        self._websockets: WebsocketServer | None = None
        self._transport: Transport | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._connections: set[Connection] = set()

    async def start(self) -> None:
        """Bind the ports, then begin to load: clients may connect and wait at once."""
        options = self.options
        openpi = options.protocol == "openpi"
        port = options.listening_port if openpi else options.http_port
        try:
            self._websockets = await self._open_websockets(port)
        except OSError as error:
            raise port_in_use(options.host, port, error) from error
        self.http_port = self.port = next(iter(self._websockets.sockets)).getsockname()[1]
        if not openpi:
            self._transport = self._open_transport()
            try:
                await self._transport.start()
            except ServeError:
                self._websockets.close()
                raise
            self.port = self._transport.port
        self.worker.on_state(self._hear)
        self.worker.start()
        self._housekeeping = asyncio.create_task(self._expire_sessions())
        host = bracketed(options.host)
        scheme = "http" if options.certificate is None else "https"
        self._say(f"{options.protocol} at {host}:{self.port}, page at {scheme}://{host}:{self.http_port}/")

    async def ready(self) -> None:
        """Wait until the policy is warm. Raises what its loader raised."""
        await self._settled.wait()
        if self.worker.failure is not None:
            raise self.worker.failure

    async def replace(self, load: Callable[[], Policy]) -> int:
        """Swap the policy between two decisions; returns the new weights version."""
        return await asyncio.wrap_future(self.worker.replace(load))

    async def stop(self) -> None:
        """Drain: refuse new requests, answer those accepted, close every connection and port."""
        done = asyncio.wrap_future(self.worker.drain())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, DRAIN_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(each.flush() for each in self._connections)), FLUSH_SECONDS)
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self._transport is not None:
            await self._transport.stop()
        if self._websockets is not None:
            self._websockets.close(code=1001, reason="the server is shutting down")
            await self._websockets.wait_closed()

    async def run(self) -> None:
        """Start, serve until SIGTERM or SIGINT, drain. SIGHUP loads the weights again. Raises what broke the policy."""
        await self.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._interrupt)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        await self._over.wait()
        await self.stop()
        if self.worker.failure is not None:
            raise self.worker.failure

    def _interrupt(self) -> None:
        if self._over.is_set():  # the first signal came twice, as `timeout` sends it
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
        self._say("answering what was accepted, then ending; a second signal ends at once")
        self._over.set()

    def _reload(self) -> None:
        def report(task: "asyncio.Task[int]") -> None:
            if task.exception() is not None:
                self._say(f"the weights were not replaced, the old ones stay: {task.exception()}")
            else:
                self._say(f"weights version {task.result()} is in use")

        self._reloading = asyncio.create_task(self.replace(self._load))
        self._reloading.add_done_callback(report)

    async def _open_websockets(self, port: int) -> WebsocketServer:
        return await serve(
            self._serve_client,
            self.options.host,
            port,
            compression=None,
            max_size=self.options.max_message,
            ping_interval=None,  # a robot's own pings are answered; TCP itself notices dead peers
            process_request=self._answer_http,
            subprotocols=[Subprotocol(PROTOCOL)],
            select_subprotocol=_select,
            ssl=self.options.tls(),
            server_header=None,
        )

    def _open_transport(self) -> Transport:
        if self.options.protocol == "lerobot":
            from innerloop.serve.grpc import LeRobotTransport

            return LeRobotTransport(self.worker, self._settled, self.options)
        from innerloop.serve.zmq import GrootTransport

        return GrootTransport(self.worker, self._settled, self.options)

    async def _serve_client(self, client: ServerConnection) -> None:
        if len(self._connections) >= self.options.max_clients:
            await client.close(1013, f"all {self.options.max_clients} places are taken; retry later")
            return
        _notice_death(client.transport.get_extra_info("socket"))
        connection = Connection(client, self.worker, self.truth, self.options.rate)
        self._connections.add(connection)
        self.metrics.clients.set(len(self._connections))
        try:
            await connection.serve(self._settled)
        finally:
            self._connections.discard(connection)
            self.metrics.clients.set(len(self._connections))

    async def _answer_http(self, _: ServerConnection, request: Request) -> Response | None:
        return await self._pages.answer(request)

    def _hear(self, state: State) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, state)

    def _note(self, state: State) -> None:
        if state is not State.WARMING:
            self._settled.set()
        if state is State.FAILED:
            self._over.set()
        self._say(str(state))

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(self.options.session_timeout / 4)
            self.worker.expire(self.options.session_timeout)


def run_server(load: Callable[[], Policy], options: ServeOptions, say: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. `load` runs in the worker's thread and returns a policy that is warm.

    `say` is told the addresses and every change of state; by default they go to standard error.
    """

    async def main() -> None:
        await Server(load, options, say or _to_standard_error).run()

    asyncio.run(main())


def _to_standard_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _notice_death(connection: socket.socket) -> None:
    """A robot without power or network says no goodbye: after a minute its place and its session are free again."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _select(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return Subprotocol(PROTOCOL) if PROTOCOL in offered else None
