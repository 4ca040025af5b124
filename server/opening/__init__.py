"""The opening of a secure sum: from members' shares to the streams that are taken off the sum of masked updates."""
