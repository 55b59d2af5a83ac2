"""Messages of the protocols to dataclasses and back, and the limits that both keep."""
