"""The identities of a federation: names in certificates, enrolment and renewal, credentials, signed statements.

Imports: `settings`, `durable` and other modules of `protocol` below it, and `wire`; from the ground
`aggregation/folders`.
"""
