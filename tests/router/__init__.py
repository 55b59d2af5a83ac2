"""A client that drives a shard exactly as a stock TGI router does, and the checks made with it."""

import pytest

pytest.register_assert_rewrite("router.conformance")
