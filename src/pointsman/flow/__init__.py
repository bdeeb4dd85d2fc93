"""What happens to one request, told as stories: generators that yield commands and get results back.

No story waits, sends or reads a clock. A test plays the driver's part, and `pointsman.net.driver` plays it on sockets.
"""

__all__: list[str] = []
