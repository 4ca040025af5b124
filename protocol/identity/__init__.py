"""The identities of a federation: names in certificates, enrolment and renewal, credentials, signed statements."""
