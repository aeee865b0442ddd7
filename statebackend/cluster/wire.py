"""Connections between the driver, hosts and tasks: plain TCP, both ends proved, sizes bounded, nothing unpickled.

From the ground up: `streams` are sockets that threads may share, `handshake` is how two ends prove themselves, `links`
exchange frames of a JSON header and a body of bytes, and `listener` accepts and serves. This module has their names.

>>> def serve(link, role):
...     rows = link.receive(timeout=10)
...     link.send("staged", role=role, batch=rows.header["batch"], size=len(rows.body))
>>> secret = b"of the query"
>>> listener = Listener(secret, serve)
>>> with connect(listener.address, secret, role="task") as link:
...     link.send("rows", [b"some ", b"rows"], batch=7)
...     link.receive(timeout=10).header
{'op': 'staged', 'role': 'task', 'batch': 7, 'size': 9}
>>> connect(listener.address, b"of another", role="task")
Traceback (most recent call last):
statebackend.cluster.streams.LinkClosed: the peer closed instead of proving itself (127.0.0.1:...
>>> listener.refused
1
>>> listener.close()
"""

from __future__ import annotations

from statebackend.cluster.handshake import MAX_ROLE, VERSION
from statebackend.cluster.links import MAX_BODY, MAX_HEADER, Link, Message, connect
from statebackend.cluster.listener import Listener
from statebackend.cluster.streams import Buffer, LinkClosed, LinkError, WireError

__all__ = [
    "MAX_BODY",
    "MAX_HEADER",
    "MAX_ROLE",
    "VERSION",
    "Buffer",
    "Link",
    "LinkClosed",
    "LinkError",
    "Listener",
    "Message",
    "WireError",
    "connect",
]
