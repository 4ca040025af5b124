"""A task that answers the messages of a server program, for tests; it fails when it is told to."""

import numpy as np

from atoll.task.content import Content

ODD = {
    "query.objects": Content(None, {"w": np.array([object()])}),
    "query.bytes": Content(b"bytes"),
    "query.keys": Content({1: "a key that is no text"}),
}
"""Replies that no message can have."""


class Answering:
    """Adds the site's number to each array of a message."""

    sites = ("north", "south", "east")

    def initial(self, seed):
        return {"w": np.zeros(1, np.float32)}

    def train(self, parameters, instructions):
        raise NotImplementedError("this task answers messages only")

    def message(self, kind, content, *, site):
        plain = content.plain or {}
        if kind == "query.fail":
            raise ValueError(f"{site} has no answer")
        if kind == "query.odd":
            return "no content"
        if kind == "query.echo":
            return content
        if kind in ODD:
            return ODD[kind]
        own = 1 + self.sites.index(site)
        noise = np.random.random() if plain.get("noise") else 0.0
        arrays = {name: array + own + noise for name, array in content.arrays.items()}
        return Content({"site": site, "kind": kind, "num-examples": own, "echo": plain}, arrays)


task = Answering()
