"""A server that ends the answers under way when it stops, instead of waiting for them."""

import socket

from toolkit.extras import extra

with extra("serve"):
    import uvicorn


class StoppingServer(uvicorn.Server):
    """Serves an application of `make_app`. A client whose answer is cut off is told so."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel all answers, which end with their next pass, then wait for the connections."""
        self.config.app.state.cancel()  # type: ignore[union-attr]
        await super().shutdown(sockets)
