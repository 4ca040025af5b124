"""The transfers of bulk bytes: uploads with their verdicts and timeouts, downloads of versions."""
