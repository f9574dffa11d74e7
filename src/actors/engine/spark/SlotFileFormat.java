import java.io.FileInputStream;
import java.io.IOException;
import java.io.Serializable;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.ArrowStreamReader;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.mapreduce.Job;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection$;
import org.apache.spark.sql.execution.datasources.FileFormat;
import org.apache.spark.sql.execution.datasources.OutputWriterFactory;
import org.apache.spark.sql.execution.datasources.PartitionedFile;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.util.TaskCompletionListener;

/**
 * Reads slot files: an Arrow stream of one batch.
 *
 * A slot contains a few rows, and a plan reads it in many places. Opening a Parquet file takes
 * longer than reading these rows, and needs a Hadoop configuration of over a thousand entries,
 * which each scan of a plan keeps and each scan in a task copies.
 */
public class SlotFileFormat implements FileFormat, DataSourceRegister, Serializable {
  public String shortName() {
    return "slot";
  }

  public scala.Option inferSchema(
      SparkSession session,
      scala.collection.immutable.Map options,
      scala.collection.immutable.Seq files) {
    return scala.Option.empty();
  }

  public OutputWriterFactory prepareWrite(
      SparkSession session, Job job, scala.collection.immutable.Map options, StructType schema) {
    throw new UnsupportedOperationException("slot files are written by the service alone");
  }

  public scala.Function1 buildReaderWithPartitionValues(
      SparkSession session,
      StructType data,
      StructType partition,
      StructType required,
      scala.collection.immutable.Seq filters,
      scala.collection.immutable.Map options,
      Configuration configuration) {
    return new SlotReader(required);
  }
}

/** Reads the given columns of a slot file. */
class SlotReader extends scala.runtime.AbstractFunction1 implements Serializable {
  private final StructType columns;

  SlotReader(StructType columns) {
    this.columns = columns;
  }

  public Object apply(Object file) {
    String path = ((PartitionedFile) file).toPath().toUri().getPath();
    SlotBatch read = new SlotBatch();
    TaskContext.get().addTaskCompletionListener(read);
    try {
      return scala.jdk.javaapi.CollectionConverters.asScala(
              read.of(path, columns.fieldNames()).rowIterator())
          .map(UnsafeProjection$.MODULE$.create(columns));
    } catch (IOException error) {
      throw new IllegalStateException("slot " + path + " cannot be read: " + error, error);
    }
  }
}

/** Keeps the memory of a slot's rows until the task ends. */
class SlotBatch implements TaskCompletionListener {
  private BufferAllocator memory;
  private ArrowStreamReader reader;

  ColumnarBatch of(String path, String[] names) throws IOException {
    memory = ArrowUtils.rootAllocator().newChildAllocator("slot", 0L, Long.MAX_VALUE);
    reader = new ArrowStreamReader(new FileInputStream(path).getChannel(), memory);
    VectorSchemaRoot root = reader.getVectorSchemaRoot();
    if (!reader.loadNextBatch()) {
      throw new IOException("it has no batch");
    }
    ColumnVector[] columns = new ColumnVector[names.length];
    for (int i = 0; i < names.length; i++) {
      columns[i] = new ArrowColumnVector(root.getVector(names[i]));
    }
    return new ColumnarBatch(columns, root.getRowCount());
  }

  public void onTaskCompletion(TaskContext context) {
    try {
      if (reader != null) {
        reader.close();
      }
    } catch (IOException error) {
      throw new IllegalStateException("a slot cannot be closed: " + error, error);
    } finally {
      if (memory != null) {
        memory.close();
      }
    }
  }
}
