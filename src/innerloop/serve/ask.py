"""A request to the worker, awaited."""

import asyncio

from innerloop.serve.protocol import Reply, Request
from innerloop.serve.worker import Worker


async def ask(worker: Worker, request: Request, client: str) -> Reply:
    """The worker's reply; the caller's event loop stays free meanwhile."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Reply] = loop.create_future()

    def settle(reply: Reply) -> None:
        if not future.done():
            future.set_result(reply)

    def deliver(reply: Reply) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, reply)

    worker.submit(request, client, deliver)
    return await future
