"""FX to FX passes, each a file. The ordered list of passes is data: `plait.pipelines.GRAPH`."""
