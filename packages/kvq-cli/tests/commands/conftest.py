"""Processes of `kvq serve`."""

import pytest
from serve_process import Process


@pytest.fixture
def start():
    """Start processes that do not outlive the test."""
    started = []

    def start(*arguments, **how):
        started.append(Process(*arguments, **how))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
        process.end()
        process.process.stdout.close()
