"""What any shard must do for TGI's routers, as tests: each is one promise of the protocol.

A test module takes them all over with `from router.conformance import *` and gives them the
fixture `shard_address`: the path of the shard's unix socket (`{uds_path}-0`). Any text model will
do; prompts are a few words, limits a few dozen tokens. What a shard does not offer is skipped.
"""

from router.conformance.batches import *  # noqa: F403
from router.conformance.chunks import *  # noqa: F403
from router.conformance.fixtures import *  # noqa: F403
from router.conformance.loops import *  # noqa: F403
from router.conformance.promises import *  # noqa: F403
from router.conformance.prompts import *  # noqa: F403
from router.conformance.refusals import *  # noqa: F403
from router.conformance.startup import *  # noqa: F403
from router.conformance.tokens import *  # noqa: F403
