"""Which shapes of images are worth capturing: those that come back, and no more than time allows.

To capture the layers of a tower takes as long as two or three images, and streams of text wait
meanwhile; it pays if the shape comes again a few times. Of callers that send ever other shapes, or
more of them than are kept, every image would be captured.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

#: A shape that comes back is captured if so many images have come since it was seen last, at most.
SOON = 32
#: Shapes that are remembered as seen.
_MOST_SEEN = 64
#: Of all time, what captures may take; and seconds that may be saved up for them.
SHARE, SAVED_SECONDS = 0.03, 0.5


class CapturePace:
    """What has been seen of shapes that are not captured, and the time that is left for captures.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The number of the image with which each shape was seen last.
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._images = 0
        self._left, self._since = SAVED_SECONDS, clock()

    def begin(self) -> None:
        """A new image comes."""
        self._images += 1

    def worth(self, shape: Hashable) -> bool:
        """Whether to capture the shape of this image, which is not captured."""
        last = self._seen.pop(shape, None)
        self._seen[shape] = self._images
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        if last is None or self._images - last > SOON:
            return False
        now = self._clock()
        self._left = min(self._left + SHARE * (now - self._since), SAVED_SECONDS)
        self._since = now
        return self._left > 0

    def took(self, seconds: float) -> None:
        """So long a capture took."""
        self._left -= seconds
