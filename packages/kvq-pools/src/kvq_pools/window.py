"""What a sliding window can see, and the pages that takes.

A query at position p with window w sees w positions, its own included:

    0 ········ p-w | p-w+1 ······· p | p+1 ···
      never again  |     visible     |  not yet
"""

from __future__ import annotations

from kvq_pools.errors import whole_number


def first_visible(position: int, window: int) -> int:
    """First position that a query at `position` sees; later queries see nothing before it."""
    whole_number("window", window, 1)
    return max(0, whole_number("position", position) - window + 1)


def window_pages_per_request(window: int, max_step_tokens: int, page_tokens: int) -> int:
    """Most pages that a request holds at once in a window tier, exactly.

    A request computes at most `max_step_tokens` tokens a step and releases after each step
    what no later query sees. During a step it then holds the window - 1 positions before it
    and the step's own, and the first of them may be the last of its page.
    """
    whole_number("window", window, 1)
    whole_number("max_step_tokens", max_step_tokens, 1)
    whole_number("page_tokens", page_tokens, 1)
    held = window - 1 + max_step_tokens
    return 1 + (held - 1 + page_tokens - 1) // page_tokens
