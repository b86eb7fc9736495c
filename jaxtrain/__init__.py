"""jaxtrain: config ─▶ cluster ─▶ layout ─▶ task ─▶ plan ─▶ loader ─▶ feed ─▶ train_step ─▶ metrics.

Read `jaxtrain.train.run` from top to bottom: it is the whole program.
"""
