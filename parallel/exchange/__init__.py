"""The exchange of a model between files and the ranks of a mesh, box by box: no process holds more than its share."""
