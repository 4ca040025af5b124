"""The blocks of the pages: executed, or read by the code that they are for, unless the page says why not."""
