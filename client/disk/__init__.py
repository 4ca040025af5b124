"""The state that an agent keeps on its disk: spool, model cache, residuals, client state, rollback protection."""
