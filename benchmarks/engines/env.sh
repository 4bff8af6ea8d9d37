# Source it on the machine: where the bundle lies, and what an engine needs to start without a network.
export BUNDLE=${BUNDLE:-/tmp/vq33} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export SITE=$BUNDLE/site FOLDERS=${FOLDERS:-$BUNDLE/folders}
# quantkit first, as installed from its wheel: engines find the plug-in by its entry point, which a checkout has not.
export PYTHONPATH=$BUNDLE/quantkit:$SITE PATH=$CUDA_HOME/bin:$PATH PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
# Parts that are not in the bundle: FlashInfer, DeepGEMM. cuDNN is the machine's, older than torch's.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_WORKER_MULTIPROC_METHOD=spawn OMP_NUM_THREADS=4
# The driver's libcuda for what Triton links, nvcc's ptxas for what it assembles.
export LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib:$CUDA_HOME/lib64/stubs:$CUDA_HOME/targets/x86_64-linux/lib/stubs:$CUDA_HOME/lib64:${LIBRARY_PATH:-}
for tool in ptxas cuobjdump nvdisasm; do [ ! -x "$CUDA_HOME/bin/$tool" ] || export "TRITON_${tool^^}_PATH=$CUDA_HOME/bin/$tool"; done
cache=$BUNDLE/cache; mkdir -p "$cache"
export CUDA_CACHE_PATH=$cache/cuda CUDA_CACHE_MAXSIZE=4294967296 VLLM_CACHE_ROOT=$cache/vllm TRITON_CACHE_DIR=$cache/triton \
  TORCHINDUCTOR_CACHE_DIR=$cache/inductor HUMMING_CACHE_DIR=$cache/humming QUANTKIT_CACHE=$cache/quantkit
