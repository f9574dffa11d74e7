-- A manager's months that differ from the average.
select i_manager_id, sum_sales, avg_monthly_sales
from (
  select
    i_manager_id, sum(ss_sales_price) as sum_sales,
    avg(sum(ss_sales_price)) over (partition by i_manager_id) as avg_monthly_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  where d_month_seq in (
      1200, 1201, 1202, 1203, 1204, 1205, 1206, 1207, 1208, 1209, 1210, 1211)
    and (
      (i_category in ('Books', 'Children', 'Electronics')
        and i_class in ('personal', 'portable', 'reference', 'self-help')
        and i_brand in (
          'scholaramalgamalg #14', 'scholaramalgamalg #7', 'exportiunivamalg #9',
          'scholaramalgamalg #9'))
      or (i_category in ('Women', 'Music', 'Men')
        and i_class in ('accessories', 'classical', 'fragrances', 'pants')
        and i_brand in (
          'amalgimporto #1', 'edu packscholar #1', 'exportiimporto #1', 'importoamalg #1'))
    )
  group by i_manager_id, d_moy
) as monthly
where case when avg_monthly_sales > 0
  then abs(sum_sales - avg_monthly_sales) / avg_monthly_sales end > 0.1
order by i_manager_id, avg_monthly_sales, sum_sales
limit 100
