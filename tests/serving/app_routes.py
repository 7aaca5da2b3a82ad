"""The routes of the applications, from their own tables: what is tested over them covers a route that is added."""

import re
from collections.abc import Iterator
from typing import Any

from fake_llm import FakeLLM
from fastapi import FastAPI

from diptych.control.cluster.cluster_config import cluster_config
from diptych.serving.api.app import build_app
from diptych.serving.api.front_app import build_front_app
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.external_fleet import ExternalFleet, FrontOptions
from diptych.serving.front.served_engines import EngineFront

OPEN = {"/", "/health", "/ready", "/ui", "/ui/", "/docs", "/guide", "/compare", "/compare/", "/static/x"}
PAGES = re.compile(r"/guide/(?!api/)\w*/?")


def server_app(**keys: Any) -> FastAPI:
    """What ``diptych serve`` answers."""
    return build_app(FakeLLM(), "fake", **keys)  # type: ignore[arg-type]


def front_app(**keys: Any) -> FastAPI:
    """What ``diptych front`` answers."""
    fleet = ExternalFleet(FrontOptions((EngineSpec("vllm", "http://127.0.0.1:9"),)), cluster_config())
    return build_front_app(EngineFront(fleet), **keys)


def calls_of(app: Any) -> list[tuple[str, str]]:
    """A method and a path for each route."""
    return list(_calls(app))


def _calls(app: Any) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        path = re.sub(r"\{\w+:int\}", "0", getattr(route, "path", ""))
        path = re.sub(r"\{[^}]*\}", "x", path)
        methods = getattr(route, "methods", None)
        yield from ((method, path) for method in sorted(methods or ("GET",)))  # what is mounted names no methods


def is_open(path: str) -> bool:
    """Whether a path is for load balancers and pages, and asks for no key."""
    return path in OPEN or PAGES.fullmatch(path) is not None
